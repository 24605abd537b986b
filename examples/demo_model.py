"""Sizes of the demo's models, its special tokens and its chat template, all after the real model's."""

from __future__ import annotations

import dataclasses

from ddtree_jax.models import DFlashConfig, KimiK26Config
from ddtree_jax.models.dflash.windows import DraftLayer
from ddtree_jax.models.rope import RopeConfig
from ddtree_jax.models.text import SHOWN, SPECIAL_OFFSETS

SPECIAL_TOKENS = 256
CHAT_TEMPLATE = """\
{#- Kimi K2.6's form: a turn is <|im_KIND|>NAME<|im_middle|>TEXT<|im_end|>, with nothing between turns. -#}
{%- macro text(message) -%}
  {%- set content = message.get("content") -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part.type != "text" -%}
        {{- raise_exception("a part of type " ~ part.type ~ " is not served") -}}
      {%- endif -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro calls(message) -%}
  <|tool_calls_section_begin|>
  {%- for call in message.tool_calls -%}
    {%- set arguments = call.function.arguments -%}
    <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
    {{- arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
  {%- endfor -%}
  <|tool_calls_section_end|>
{%- endmacro -%}
{#- Reasoning is shown again after the last answer, where tools are still at work, or wherever asked for. -#}
{%- set last = namespace(answer=-1) -%}
{%- if not preserve_thinking -%}
  {%- for message in messages -%}
    {%- if message.role == "assistant" and not message.get("tool_calls") -%}
      {%- set last.answer = loop.index0 -%}
    {%- endif -%}
  {%- endfor -%}
{%- endif -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>
  {{- tools_ts_str or tools | tojson(separators=(",", ":")) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- set name = message.get("name") or message.role -%}
  {%- if message.role == "user" -%}
    <|im_user|>{{ name }}<|im_middle|>
  {%- elif message.role == "assistant" -%}
    <|im_assistant|>{{ name }}<|im_middle|><think>
    {%- if loop.index0 > last.answer -%}
      {{- message.get("reasoning_content") or "" -}}
    {%- endif -%}
    </think>
  {%- else -%}
    <|im_system|>{{ name }}<|im_middle|>
    {%- if message.role == "tool" -%}
      {{- "## Return of " ~ message.get("tool_call_id", "") ~ "\\n" -}}
    {%- endif -%}
  {%- endif -%}
  {{- text(message) -}}
  {%- if message.get("tool_calls") -%}
    {{- calls(message) -}}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|><think>
  {%- if thinking is defined and not thinking -%}
    </think>
  {%- endif -%}
{%- endif -%}
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the sizes "demo" and "toy" differ in."""

    ranks: int = 2032
    hidden: int = 384
    layers: int = 4
    heads: int = 2
    head_dim: int = 64
    query_rank: int = 128
    inner: int = 1536
    expert_inner: int = 96
    experts: int = 16
    shared_experts: int = 8
    draft_inner: int = 768
    draft_layers: int = 2
    taps: tuple[int, ...] = (1, 2, 3)


SIZES = {
    "demo": Sizes(),
    "toy": Sizes(
        ranks=512,
        hidden=64,
        layers=2,
        heads=2,
        head_dim=32,
        query_rank=32,
        inner=64,
        expert_inner=32,
        experts=4,
        shared_experts=1,
        draft_inner=64,
        draft_layers=1,
        taps=(0, 1),
    ),
}

MAX_POSITIONS = 4096
_ROPE = RopeConfig(
    theta=50000.0,
    factor=4.0,
    original_max_position_embeddings=1024,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def token_ids(sizes: Sizes) -> dict[str, int]:
    """Ids that the wrapper's config.json names beside the end tokens."""
    return {
        "bos_token_id": sizes.ranks + SPECIAL_OFFSETS["[BOS]"],
        "pad_token_id": sizes.ranks + SPECIAL_OFFSETS["[PAD]"],
    }


def target_config(sizes: Sizes) -> KimiK26Config:
    """A K2.6 in small: the latent and the rotary width are the real ones."""
    return KimiK26Config(
        vocab_size=sizes.ranks + SPECIAL_TOKENS,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        q_lora_rank=sizes.query_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=sizes.head_dim,
        qk_rope_head_dim=64,
        v_head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        moe_intermediate_size=sizes.expert_inner,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=2,
        n_shared_experts=sizes.shared_experts,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_POSITIONS,
        rope=_ROPE,
        # A document ends with [EOS], a chat turn with <|im_end|>.
        eos_token_ids=(
            sizes.ranks + SPECIAL_OFFSETS["[EOS]"],
            sizes.ranks + SPECIAL_OFFSETS["<|im_end|>"],
        ),
    )


def drafter_config(sizes: Sizes) -> DFlashConfig:
    """A DFlash drafter with Kimi's block of 8 and [UNK] as its mask."""
    return DFlashConfig(
        vocab_size=sizes.ranks + SPECIAL_TOKENS,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.draft_inner,
        num_hidden_layers=sizes.draft_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_POSITIONS,
        rope=_ROPE,
        block_size=8,
        mask_token_id=sizes.ranks + SPECIAL_OFFSETS["[UNK]"],
        taps=sizes.taps,
        num_target_layers=sizes.layers,
        layers=(DraftLayer(),) * sizes.draft_layers,
    )


def tokenizer_json(sizes: Sizes) -> dict:
    """tokenizer_config.json: the special tokens by id."""
    return {
        "added_tokens_decoder": {
            str(sizes.ranks + offset): {"content": token, "special": token not in SHOWN}
            for token, offset in SPECIAL_OFFSETS.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "TikTokenTokenizer",
    }
