"""The JSON Schema of a configuration file, generated from the structs."""

from typing import Any

import msgspec

from gateway.config.model import Config

_PLAIN = {"boolean", "integer", "number"}
_LIMITS = ("type", "minimum", "maximum")
_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) with which editors check `config/*.yaml`."""
    schema = msgspec.json.schema(Config)
    for section in schema["$defs"].values():
        section["properties"] = {name: _or_variable(item) for name, item in section["properties"].items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mrtr-gateway configuration",
        **schema,
    }


def _or_variable(item: dict[str, Any]) -> dict[str, Any]:
    """Allow `${VAR}` for a number, a boolean or a choice, as the loader does."""
    if any("enum" in choice or choice.get("type") in _PLAIN for choice in item.get("anyOf", ())):
        return {**item, "anyOf": [*item["anyOf"], _VARIABLE]}
    if "enum" in item:
        limits = {"enum": item["enum"]}
    elif item.get("type") in _PLAIN:
        limits = {name: item[name] for name in _LIMITS if name in item}
    else:
        return item
    rest = {name: value for name, value in item.items() if name not in limits}
    return {**rest, "anyOf": [limits, _VARIABLE]}
