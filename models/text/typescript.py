"""Declarations of tools in the TypeScript form that K2.5's and K2.6's templates take as `tools_ts_str`.

The published checkpoints' `tool_declaration_ts.py` defines the form. The model was trained on its
text, so what looks odd in it is kept: Python's spelling of numbers and of true in comments,
required fields first except in a type that refers to itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_INDENT = "  "
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


def typescript(tools: Sequence[Mapping[str, Any]]) -> str:
    """The functions among `tools` as a TypeScript namespace; "" where there is none.

    Args:
      tools: `{"type": "function", "function": {"name", "description", "parameters"}}` each, with
        `parameters` a JSON schema. Fields of a type that refers to itself keep their order.

    Raises:
      ValueError: a schema that the form cannot say, `oneOf` for instance.
    """
    declared = [tool.get("function") for tool in tools if tool.get("type") == "function"]
    try:
        functions = [_function(function) for function in declared if function]
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"not a JSON schema of a function's parameters ({error!r})") from error
    if not functions:
        return ""
    body = "\n".join(functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


@dataclasses.dataclass(frozen=True)
class _Type:
    """A parsed type: how it is written at an indent, and what its comments say."""

    write: Callable[[str], str]
    description: str = ""
    limits: str = ""

    def comments(self, indent: str) -> str:
        lines = _comment(self.description, indent) + "\n" if self.description else ""
        return lines + (f"{indent}// {self.limits}\n" if self.limits else "")


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    type: _Type
    optional: bool
    default: Any

    def write(self, indent: str) -> str:
        default = ""
        if self.default is not None:
            python = isinstance(self.default, int | float)
            value = repr(self.default) if python else json.dumps(self.default, ensure_ascii=False)
            default = f"{indent}// Default: {value}\n"
        mark = "?" if self.optional else ""
        return (
            f"{self.type.comments(indent)}{default}{indent}{self.name}{mark}: "
            f"{self.type.write(indent)}"
        )


def _function(function: Mapping[str, Any]) -> str:
    schema = _Schema()
    fields, parameters = schema.object(function.get("parameters") or {})
    interfaces = []
    root = None
    if schema.refers_to_itself:
        root = "parameters"
        lines = ",\n".join(field.write(_INDENT) for field in fields)
        body = f"\n{lines}\n" if lines else ""
        interfaces.append(f"interface {root} {{{body}}}")
    for name, definition in list(schema.definitions.items()):
        written = schema.parse(definition).write("")
        about = definition.get("description", "")
        about = _comment(about, "") + "\n" if about else ""
        interfaces.append(f"{about}interface {name} {written}")
    about = function.get("description")
    argument = parameters.write("") if root is None else root
    declaration = f"type {function.get('name', 'function')} = (_: {argument}) => any;"
    parts = ["\n".join(interfaces), _comment(about, "") if about else "", declaration]
    return "\n".join(part for part in parts if part)


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


class _Schema:
    """The JSON schema of one function's parameters, with the definitions that its types refer to."""

    def __init__(self):
        self.definitions: dict[str, Any] = {}
        self.refers_to_itself = False

    def parse(self, schema: Any) -> _Type:
        """The type that `schema` describes."""
        if isinstance(schema, bool):
            return _Type(lambda indent: "any" if schema else "null")
        if not isinstance(schema, Mapping):
            raise ValueError(f"no JSON schema: {schema!r}")
        about = schema.get("description", "")
        if "$ref" in schema:
            name = self._refer(schema["$ref"])
            return _Type(lambda indent: name, about)
        if "anyOf" in schema:
            types = [self.parse(choice) for choice in schema["anyOf"]]
            return _Type(lambda indent: " | ".join(type.write(indent) for type in types), about)
        if "enum" in schema:
            choices = _enum(schema)
            return _Type(lambda indent: choices, about)
        if "type" in schema:
            return self._typed(schema, about)
        if not schema:
            return _Type(lambda indent: "any")
        raise ValueError(f"a JSON schema without a type: {schema!r}")

    def object(self, schema: Mapping[str, Any]) -> tuple[list[_Field], _Type]:
        """The fields of an object, in the schema's order, and its type."""
        self.definitions.update(schema.get("$defs") or {})
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping):
            others = self.parse(others)
        elif not (others is None or isinstance(others, bool)):
            raise ValueError(f"additionalProperties is {others!r}")
        required = schema.get("required", [])
        fields = [
            _Field(
                name,
                self.parse(field),
                name not in required,
                field.get("default") if isinstance(field, Mapping) else None,
            )
            for name, field in schema.get("properties", {}).items()
        ]
        # Required fields first, each group by name.
        ordered = sorted(fields, key=lambda field: (field.optional, field.name))

        def write(indent: str) -> str:
            inner = indent + _INDENT
            lines = [field.write(inner) for field in ordered]
            if others is not None:
                named = {True: "any", False: "never"}
                text = named[others] if isinstance(others, bool) else others.write(inner)
                lines.append(f"{inner}[k: string]: {text}")
            return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

        return fields, _Type(write, schema.get("description", ""))

    def _typed(self, schema: Mapping[str, Any], about: str) -> _Type:
        kind = schema["type"]
        if isinstance(kind, list):
            union = " | ".join(_UNION[one] for one in kind)
            return _Type(lambda indent: union, about)
        if not isinstance(kind, str):
            raise ValueError(f"a type is {kind!r}")
        if kind == "object":
            return self.object(schema)[1]
        limits = ", ".join(
            f"{key}: {schema[key]}" for key in _LIMITS.get(kind, ()) if key in schema
        )
        if kind != "array":
            written = "number" if kind == "integer" else kind
            return _Type(lambda indent: written, about, limits)
        items = schema.get("items")
        item = self.parse(items) if items else _Type(lambda indent: "any")

        def write(indent: str) -> str:
            inner = indent + _INDENT
            comments = item.comments(inner)
            if not comments:
                return f"Array<{item.write(indent)}>"
            return f"Array<\n{comments}{inner}{item.write(inner)}\n{indent}>"

        return _Type(write, about, limits)

    def _refer(self, reference: str) -> str:
        if reference == "#":
            self.refers_to_itself = True
            return "parameters"
        name = reference.split("/")[-1]
        if not reference.startswith("#/$defs/") or name not in self.definitions:
            raise ValueError(f"no such definition: {reference}")
        return name


def _enum(schema: Mapping[str, Any]) -> str:
    values = schema["enum"]
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if len(kinds) == 2 and "null" in kinds:
            kinds = [kinds[1] if kinds[0] == "null" else kinds[0]]
        if len(kinds) != 1:
            raise ValueError(f"an enum of the types {kinds}")
        wanted = _ENUM.get(kinds[0])
        for value in values:
            if wanted and value is not None and not isinstance(value, wanted):
                raise ValueError(f"the enum's value {value!r} is no {kinds[0]}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
