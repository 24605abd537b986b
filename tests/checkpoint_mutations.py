"""Seeded damage to the files of a checkpoint: headers, index, configs, tokenizer, template."""

from __future__ import annotations

import json
import os
import pathlib
import struct

import numpy as np

_NESTED = json.loads("[" * 200 + "]" * 200)
#: Values that no key expects, and some that many do.
VALUES = (
    None, True, False, 0, -1, 1, 2, 7, 64, 2**24, 2**31, 2**63, 10**400, -(2**70), 0.5, -0.0, 1e-320, 1e308, 1e-45,
    float("nan"), float("inf"), "", "x", "float8", "yarn", "full_attention", "\ud800", "\x00", "a" * 5000, [], {}, [1],
    [[]], ["x", 3], {"a": 1}, _NESTED, {"rope_type": "yarn", "factor": 4.0}, [None] * 1000,
)  # fmt: skip
_KEYS = (
    "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types", "text_config", "vocab_size",
    "num_hidden_layers", "n_routed_experts", "quantization_config", "model_type", "architectures", "auto_map",
    "dflash_config", "draft_vocab_size", "eos_token_id", "weight_map", "metadata", "added_tokens_decoder", "dtype",
)  # fmt: skip
#: Pieces of templates that loop, grow, fail or reach for what is outside of the sandbox.
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9**9**9 }}", "{{ 'a' * 10**9 }}", "{{ 5|xmlattr }}", "{{ none|dictsort }}", "{% break %}", "{{ 1 / 0 }}",
    "{{ cycler().next() }}", "{{ x.y.z }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include 'x' %}",
    "{{ messages.append(1) }}", "{% set a = [] %}{% for i in range(10) %}{{ a.extend(a) }}{% endfor %}", "{{", "%}",
    "{{ lipsum.__globals__['os'].system('touch EXECUTED') }}", "{{ raise_exception('no') }}", "{% if 1 %}" * 150,
    "{{ 'x'|truncate(-5, leeway=1) }}", "{{ messages|tojson(indent=10**9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "\x00", "\ufeff", "{{ tools[0].name }}", "{{ '%s' % messages }}", "{{ '{0.__class__}'.format(1) }}",
)  # fmt: skip
#: Files beside the weights that published folders have and that must stay unread.
CODE = ("modeling_kimi.py", "tokenization_kimi.py", "configuration_deepseek.py")
_PROGRAM = "import pathlib; pathlib.Path('EXECUTED').touch()\nraise SystemExit('executed')\n"


def mutate(rng: np.random.Generator, folder: pathlib.Path) -> str:
    """Damages one file of `folder`, which may be a link to one that is shared; says what was done."""
    files = sorted(
        path
        for part in ("target", "drafter")
        for path in (folder / part).iterdir()
        if path.suffix in (".json", ".safetensors", ".model", ".jinja")
    )
    path = files[rng.integers(len(files))]
    content = path.read_bytes()
    kinds = {".json": _json, ".safetensors": _safetensors, ".model": _lines, ".jinja": _template}
    kind = _bytes if rng.random() < 0.2 else kinds[path.suffix]
    path.unlink()
    if rng.random() < 0.02:
        return f"{path.name} is missing"
    changed, done = kind(rng, content)
    path.write_bytes(changed)
    return f"{path.parent.name}/{path.name}: {done}"


def add_code(folder: pathlib.Path):
    """Programs where published folders have theirs; whoever runs one leaves a file EXECUTED."""
    for name in CODE:
        (folder / "target" / name).write_text(_PROGRAM)


def _pick(rng, values):
    return values[rng.integers(len(values))]


def _bytes(rng, content):
    content = bytearray(content)
    at = int(rng.integers(max(len(content), 1)))
    match rng.integers(5):
        case 0:
            return bytes(content[:at]), f"cut at {at}"
        case 1:
            content[at : at + 1] = rng.bytes(1)
            return bytes(content), f"another byte at {at}"
        case 2:
            return bytes(content[:at] + rng.bytes(8) + content[at:]), f"eight bytes more at {at}"
        case 3:
            return b"\xef\xbb\xbf" + bytes(content), "a byte-order mark"
        case _:
            return b"", "empty"


def _places(value, place=()):
    yield place
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from _places(inner, (*place, key))


def _changed(rng, value):
    """`value` with one of its places changed, and what was done."""
    places = list(_places(value))
    place = places[rng.integers(len(places))]
    new = _pick(rng, VALUES)
    if not place:
        if isinstance(value, dict) and rng.random() < 0.7:
            key = _pick(rng, _KEYS)
            return {**value, key: new}, f"{key} = {str(new)[:40]!r}"
        return new, f"{str(new)[:40]!r}"
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    where = ".".join(map(str, place))[-60:]
    if rng.random() < 0.25:
        del holder[place[-1]]
        return value, f"without {where}"
    holder[place[-1]] = new
    return value, f"{where} = {str(new)[:40]!r}"


def _dumped(value) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _json(rng, content):
    value, done = _changed(rng, json.loads(content))
    return _dumped(value), done


def _safetensors(rng, content):
    size = struct.unpack("<Q", content[:8])[0]
    data = content[8 + size :]
    if rng.random() < 0.3:
        wrong = _pick(rng, (0, 1, size - 1, size + 1, len(content), 2**40, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + content[8:], f"a header of {wrong} bytes"
    header, done = _changed(rng, json.loads(content[8 : 8 + size]))
    text = _dumped(header)
    return struct.pack("<Q", len(text)) + text + data, f"header: {done}"


def _lines(rng, content):
    lines = content.split(b"\n")
    at = int(rng.integers(len(lines)))
    new = _pick(
        rng,
        (
            b"",
            b"YQ==",
            b"YQ== x",
            b"!! 3",
            b"YQ== -1",
            b"YQ== 99999999999999999999",
            b"a b c",
            b"\xff 1",
            lines[0],
        ),
    )
    lines[at] = new
    return b"\n".join(lines), f"line {at}: {new!r}"


def _template(rng, content):
    text = content.decode()
    at = int(rng.integers(len(text) + 1))
    piece = _pick(rng, TEMPLATES)
    if rng.random() < 0.4:
        return piece.encode(), f"{piece[:50]!r} alone"
    return (text[:at] + piece + text[at:]).encode(), f"{piece[:50]!r} at {at}"


def link(base: pathlib.Path, folder: pathlib.Path):
    """`folder` as `base`, every file a link to its."""
    for part in ("target", "drafter"):
        (folder / part).mkdir(parents=True)
        for path in (base / part).iterdir():
            os.symlink(path, folder / part / path.name)
