"""A small tokenizer's folder: a synthetic rank file of the published format, and a template in K2.6's form."""

import base64
import pathlib

_MERGES = ["He", "ll", "Hell", "Hello", "Wo", "rl", "Worl", "World", "oW", "loW", "ab", "abc"]
_MERGES += [" d", "on", " don", "'t", " don't", "12", "123", "45", "345", "12345", "! ", "!!"]
_MERGES += ["\n\n", "user\n", "us", "er", "user"]
TOKENS = [bytes([byte]) for byte in range(256)] + [token.encode() for token in _MERGES]
TOKENS += ["你".encode()[:2], "你".encode(), "好".encode()[:2], "好".encode(), "你好".encode()]
TOKENS += [" 你好".encode()]
#: The first id after the ranks.
BASE = len(TOKENS)

#: Tools, calls, results, names and reasoning as published templates write them, without their care.
TEMPLATE = """\
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>
{%- if tools_ts_str %}{{ tools_ts_str }}{% else %}{{ tools | tojson(separators=(",", ":")) }}{% endif -%}
<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- set name = message.get("name") or message["role"] -%}
{%- if message["role"] == "user" -%}<|im_user|>{{ name }}<|im_middle|>
{%- elif message["role"] == "assistant" -%}<|im_assistant|>{{ name }}<|im_middle|>
{%- if preserve_thinking %}<think>{{ message.get("reasoning_content", "") }}</think>{% endif -%}
{%- else -%}<|im_system|>{{ name }}<|im_middle|>
{%- if message["role"] == "tool" %}## Return of {{ message.tool_call_id }}
{% endif -%}
{%- endif -%}
{%- if message["content"] is string -%}{{ message["content"] }}{%- endif -%}
{%- if message.get("tool_calls") -%}<|tool_calls_section_begin|>
{%- for call in message["tool_calls"] -%}
{%- set arguments = call["function"]["arguments"] -%}
<|tool_call_begin|>{{ call["id"] }}<|tool_call_argument_begin|>
{%- if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false %}<think></think>{% else %}<think>{% endif -%}
{%- endif -%}
"""


def write(folder: pathlib.Path, template: str | None = None) -> pathlib.Path:
    """Writes `tiktoken.model` and, where given, `chat_template.jinja` into `folder`."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(TOKENS)]
    (folder / "tiktoken.model").write_text("".join(lines))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
