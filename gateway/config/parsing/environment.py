"""Applies the process environment: `${VAR}` in strings, `GATEWAY_<SECTION>__<KEY>` for single values."""

import re
from collections.abc import Mapping

from msgspec import inspect

from gateway.config.parsing.advice import keys_below, plain
from gateway.config.parsing.problems import Given, Problem, joined, nearest
from gateway.config.parsing.retired_keys import retired

_PREFIX = "GATEWAY_"
FILE_VARIABLE = "GATEWAY_CONFIG"
"""Names the file itself, so it is no setting."""
_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<rest>:-(?P<default>[^}]*))?\}|(?P<bad>\$\{)")
# Kubernetes sets such variables in every pod for a Service called "gateway"; they are not settings.
_SERVICE_LINK = re.compile(r"GATEWAY_(?:[A-Z0-9_]+_)?(?:SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)|PORT(?:_\d+_[A-Z]+.*)?)")


def substitute(text: str, env: Mapping[str, str]) -> str:
    """Return the text with variables filled in, and `$${` as `${`; raises ValueError that names a missing one.

    As in a shell, the default of `${VAR:-default}` also stands in for an empty variable.
    """
    if "${" not in text:
        return text
    origins: list[str] = []

    def value_of(match: re.Match[str]) -> str:
        name = match["name"]
        if match["bad"]:
            raise ValueError("has a ${ that does not begin a variable; write ${NAME}, or $${ for a literal ${")
        value = "${" if name is None else env.get(name)
        if match["rest"] is not None:
            value = value or match["default"]
        if value is None:
            raise ValueError(f"${{{name}}} is not set; export {name}, or give a default: ${{{name}:-value}}")
        origins.append(match[0] if name is None else f"${{{name}}}")
        return value

    filled = _REFERENCE.sub(value_of, text)
    return Given(filled, ", ".join(origins))


def override(tree: object, kind: inspect.StructType, env: Mapping[str, str]) -> list[Problem]:
    """Put the environment's single values into `tree`, in place; return a problem for each unknown variable."""
    paths = [joined(section, field.name) for section, field in keys_below(kind) if _is_single(field)]
    places = {_PREFIX + path.replace(".", "__").upper(): path.split(".") for path in paths if "[]" not in path}
    problems: list[Problem] = []
    for name in sorted(env):
        value = env[name]
        if name in places:
            *above, last = places[name]
            section = tree
            for key in above:  # the decoder reports those that are not mappings
                section = section.setdefault(key, {}) if isinstance(section, dict) else None
            if isinstance(section, dict):
                section[last] = Given(value, name)
        elif (
            name.startswith(_PREFIX)
            and name != FILE_VARIABLE
            and not (
                # Kubernetes writes `tcp://10.0.0.1:80` into GATEWAY_X_PORT; a bare number was meant as a setting.
                _SERVICE_LINK.fullmatch(name) and (not name.endswith("_PORT") or "://" in value or "SERVICE" in name)
            )
        ):
            problems.append(Problem(name, _unknown(name, places)))
    return problems


def _unknown(name: str, places: Mapping[str, object]) -> str:
    if (instead := retired(name.removeprefix(_PREFIX).lower().replace("__", ".", 1))) is not None:
        return f"was removed: {instead}"
    meant = nearest(name.removeprefix(_PREFIX).upper(), (place.removeprefix(_PREFIX) for place in places))
    hint = (
        f'did you mean "{_PREFIX}{meant}"?'
        if meant
        else "set lists and routes in the file, with ${VAR} for their values"
    )
    return f"is not a setting; {hint}"


def _is_single(field: inspect.Field) -> bool:
    return not isinstance(plain(field.type)[0], inspect.StructType | inspect.VarTupleType | inspect.DictType)
