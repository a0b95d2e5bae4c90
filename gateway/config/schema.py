"""The JSON Schema of a configuration file, generated from the structs."""

import ast
import inspect
from itertools import pairwise
from typing import Any

import msgspec

from gateway.config.model import config, route
from gateway.config.model.config import Config
from gateway.config.route_overrides import OWN_SECTIONS

_PLAIN = {"boolean", "integer", "number"}
_LIMITS = ("type", "minimum", "maximum")
_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) with which editors check `config/*.yaml`."""
    schema = msgspec.json.schema(Config)
    texts = descriptions()
    for struct, section in schema["$defs"].items():
        section["properties"] = {
            name: {"description": texts[struct, name], **_or_variable(item)}
            for name, item in section["properties"].items()
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mrtr-gateway configuration", **schema}


def descriptions() -> dict[tuple[str, str], str]:
    """Return the descriptions of all keys by struct and field.

    It is the text below the field, which Python does not keep. A section has the docstring of its struct. A key that
    only overrides another one refers to that.
    """
    sources = "".join(map(inspect.getsource, (config, route)))
    structs = {node.name: node for node in ast.parse(sources).body if isinstance(node, ast.ClassDef)}
    found: dict[tuple[str, str], str] = {}
    for struct in structs.values():
        for node, below in pairwise([*struct.body, ast.Pass()]):
            match node, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[struct.name, name] = inspect.cleandoc(text).replace("\n", " ")
                case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=kind)), _ if kind in structs:
                    found[struct.name, name] = ast.get_docstring(structs[kind]) or ""
    for section, own in OWN_SECTIONS.items():
        for name in own.__struct_fields__:
            _ = found.setdefault((own.__name__, name), f"As `{section}.{name}`.")
    return found


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
