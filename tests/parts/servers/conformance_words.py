"""What the official conformance suite expects of a server of either era, as it is on the wire."""

import json
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

# --- what is the same for everybody who asks ---


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def embedded(uri: str, mime_type: str, words: str) -> Json:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": words}}


_IMAGE: Json = {"type": "image", "data": PNG, "mimeType": "image/png"}
CONTENTS: dict[str, list[Json]] = {
    "test_simple_text": [text("This is a simple text response for testing.")],
    "test_image_content": [_IMAGE],
    "test_audio_content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}],
    "test_embedded_resource": [
        embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
    ],
    "test_multiple_content_types": [
        text("Multiple content types test:"),
        _IMAGE,
        embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}'),
    ],
}
"""The contents of tools that only say something; the first one is also called with no arguments."""
LOGS = ("Tool execution started", "Tool processing data", "Tool execution completed")
ERROR = "This tool intentionally returns an error for testing"
_PROMPT_ARGUMENTS = {
    "test_simple_prompt": (),
    "test_prompt_with_arguments": ("arg1", "arg2"),
    "test_prompt_with_embedded_resource": ("resourceUri",),
    "test_prompt_with_image": (),
}
PROMPTS: list[Json] = [
    {
        "name": name,
        "description": "A prompt.",
        "arguments": [{"name": each, "description": f"The {each}", "required": True} for each in arguments],
    }
    for name, arguments in _PROMPT_ARGUMENTS.items()
]


def prompt(name: str, given: Json) -> Json | None:
    """The result of prompts/get; None if there is no such prompt."""
    match name:
        case "test_simple_prompt":
            contents = [text("This is a simple prompt for testing.")]
        case "test_prompt_with_arguments":
            contents = [text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]
        case "test_prompt_with_embedded_resource":
            resource = embedded(given["resourceUri"], "text/plain", "Embedded resource content for testing.")
            contents = [resource, text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            contents = [_IMAGE, text("Please analyze the image above.")]
        case _:
            return None
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def completed(value: str) -> Json:
    """The completion of an argument."""
    values = [word for word in ("paris", "park", "party") if word.startswith(value)]
    return {"values": values, "total": len(values), "hasMore": False}


_STATIC: dict[str, Json] = {
    "test://static-text": {"mimeType": "text/plain", "text": "This is the content of the static text resource."},
    "test://static-binary": {"mimeType": "image/png", "blob": PNG},
    "test://watched-resource": {"mimeType": "text/plain", "text": "Watched resource content"},
}
RESOURCES: list[Json] = [
    {"uri": uri, "name": uri.removeprefix("test://"), "mimeType": contents["mimeType"]}
    for uri, contents in _STATIC.items()
]
_BEFORE, _AFTER = "test://template/", "/data"
TEMPLATE: Json = {"uriTemplate": f"{_BEFORE}{{id}}{_AFTER}", "name": "template", "mimeType": "application/json"}


def contents(uri: str) -> Json | None:
    """The contents of a resource; None if there is no such resource."""
    if uri.startswith(_BEFORE) and uri.endswith(_AFTER):
        item = uri.removeprefix(_BEFORE).removesuffix(_AFTER)
        data = {"id": item, "templateTest": True, "data": f"Data for ID: {item}"}
        return {"uri": uri, "mimeType": "application/json", "text": json.dumps(data)}
    return {"uri": uri, **_STATIC[uri]} if uri in _STATIC else None
