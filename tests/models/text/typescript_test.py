"""Tools in TypeScript form: expected texts are those of the published tool_declaration_ts.py."""

import pytest

from ddtree_jax.models.text.typescript import typescript


def _one(parameters, **more):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"], "description": "Degrees.\n\nEither."},
        "place": {"type": "string", "maxLength": 80, "description": "City"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 3},
        "at": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
    },
    "required": ["unit", "place"],
    "additionalProperties": False,
}


def test_a_function():
    assert typescript(_one(WEATHER, description="Looks it up.\nFast.")) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// Looks it up.\n// Fast.\n"
        "type f = (_: {\n"
        "  // City\n  // maxLength: 80\n  place: string,\n"
        '  // Degrees.\n\n  // Either.\n  unit: "C" | "F",\n'
        "  at?: number | null,\n"
        "  // maximum: 14, minimum: 1\n  // Default: 3\n  days?: number,\n"
        "  [k: string]: never\n"
        "}) => any;\n"
        "}\n"
    )


@pytest.mark.parametrize(
    "schema, written",
    [
        ({}, "any"),
        (True, "any"),
        (False, "null"),
        ({"type": ["integer", "null", "array"]}, "number | null | Array<any>"),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "boolean"}}, "Array<boolean>"),
        (
            {"type": "array", "items": {"type": "string", "description": "é"}},
            "Array<\n    // é\n    string\n  >",
        ),
        ({"enum": [1, None, True, "x"]}, '1 | None | True | "x"'),
        ({"type": "object", "additionalProperties": True}, "{\n    [k: string]: any\n  }"),
        ({"type": "object", "properties": {"y": {}}}, "{\n    y?: any\n  }"),
        ({"type": "object"}, "{}"),
    ],
)
def test_a_type(schema, written):
    text = typescript(_one({"type": "object", "properties": {"x": schema}, "required": ["x"]}))
    assert text.split("(_: ")[1] == "{\n  x: " + written + "\n}) => any;\n}\n"


def test_definitions_and_a_type_that_refers_to_itself():
    parameters = {
        "$defs": {"Leaf": {"type": "object", "description": "End", "properties": {"v": {}}}},
        "properties": {"next": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/Leaf", "default": True}},
        "required": ["leaf"],
    }
    assert typescript(_one(parameters)).splitlines()[4:-1] == [
        "interface parameters {",
        "  next?: parameters,",
        "  // Default: True",
        "  leaf: Leaf",
        "}",
        "// End",
        "interface Leaf {",
        "  v?: any",
        "}",
        "type f = (_: parameters) => any;",
    ]


def test_functions_alone_are_declared():
    assert typescript([{"type": "_plugin", "function": {"name": "f"}}, {"type": "function"}]) == ""
    both = typescript([*_one({}), {"type": "function", "function": {"description": "d"}}])
    assert both.splitlines()[4:-1] == [
        "type f = (_: {}) => any;",
        "// d",
        "type function = (_: {}) => any;",
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": []},
        {"$ref": "#/$defs/None"},
        {"$ref": "elsewhere.json"},
        {"type": "string", "enum": [1]},
        {"type": ["string", "integer"], "enum": [1]},
        {"type": "object", "additionalProperties": 3},
        {"type": "object", "properties": [1]},
        {"type": ["file"]},
        {"type": {}},
        {"type": "string", "description": 5},
        "string",
        None,
    ],
)
def test_what_the_form_cannot_say(schema):
    with pytest.raises(ValueError):
        typescript(_one({"properties": {"x": schema}}))
