"""Sizes of the demo's models, its special tokens and its chat template, all after the real model's."""

from __future__ import annotations

import dataclasses

from ddtree_jax.models import DFlashConfig, KimiK26Config
from ddtree_jax.models.dflash.windows import DraftLayer
from ddtree_jax.models.rope import RopeConfig
from ddtree_jax.models.tokenizer import SPECIAL_OFFSETS

SPECIAL_TOKENS = 256
# Kimi does not flag these as special: they are text that a reader may want to see.
_NOT_SPECIAL = {
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
}

CHAT_TEMPLATE = """\
{%- macro turn(kind, name, body) -%}
<|im_{{ kind }}|>{{ name }}<|im_middle|>{{ body }}<|im_end|>
{%- endmacro -%}
{%- for message in messages -%}
  {%- set kind = message.role if message.role in ("user", "assistant") else "system" -%}
  {%- set body = message.content or "" -%}
  {%- if kind == "assistant" -%}
    {%- set body = "<think></think>" ~ body -%}
  {%- endif -%}
  {{- turn(kind, message.name or message.role, body) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_assistant|>assistant<|im_middle|>" -}}
  {{- "<think></think>" if thinking is defined and not thinking else "<think>" -}}
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
            str(sizes.ranks + offset): {"content": token, "special": token not in _NOT_SPECIAL}
            for token, offset in SPECIAL_OFFSETS.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "TikTokenTokenizer",
    }
