"""The texts and schemas that the official conformance suite expects of a server of either era."""

from typing import Any

Json = dict[str, Any]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
"""One pixel."""
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQIAAAAAAA=="
"""One sample of silence."""
TEXT: Json = {"type": "string"}
_PLAIN = ["option1", "option2", "option3"]


def _titled(word: str) -> list[Json]:
    return [
        {"const": f"value{i}", "title": f"{title} {word}"} for i, title in enumerate(("First", "Second", "Third"), 1)
    ]


FORMS: dict[str, Json] = {
    "test_elicitation": {
        "username": {**TEXT, "description": "User's response"},
        "email": {**TEXT, "description": "User's email address"},
    },
    "test_elicitation_sep1034_defaults": {
        "name": {**TEXT, "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {**TEXT, "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    },
    "test_elicitation_sep1330_enums": {
        "untitledSingle": {**TEXT, "enum": _PLAIN},
        "titledSingle": {**TEXT, "oneOf": _titled("Option")},
        "legacyEnum": {
            **TEXT,
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {**TEXT, "enum": _PLAIN}},
        "titledMulti": {"type": "array", "items": {"anyOf": _titled("Choice")}},
    },
}
"""The properties of the forms, by the tool that asks."""
_ADDRESS: Json = {"$anchor": "addressDef", "type": "object", "properties": {"street": TEXT, "city": TEXT}}
SCHEMA_2020_12: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": _ADDRESS},
    "properties": {
        "name": TEXT,
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {**TEXT, "enum": ["phone", "email"]},
        "phone": TEXT,
        "email": TEXT,
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
