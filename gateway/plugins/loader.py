"""Loads the plug-ins: parts of the gateway that its core never imports.

Each is a folder beside this file and an entry point of this package, loaded when the configuration asks for it. Types
may name what is in a plug-in; no other code of the core may.
"""

from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any, Final

_PACKAGE: Final = "mrtr-gateway"
_GROUP: Final = "mrtr_gateway.plugins"


class PluginMissing(ImportError):
    """This installation of the package lacks a plug-in, or was not installed at all."""


def plugin(name: str) -> Any:
    """Return what a plug-in offers: a class or a module; raises PluginMissing, or ImportError if it lacks a library.

    Only this package's own entry points count, so no other package on the machine can put its code here.
    """
    found = _entry_points(_PACKAGE, _GROUP).get(name)
    if found is None:
        raise PluginMissing(f"the plug-in {name} is missing; `pip install {_PACKAGE}` brings it", name=name)
    return found.load()


def find(name: str) -> Any | None:
    """Return what a plug-in offers; None if it is missing."""
    try:
        return plugin(name)
    except PluginMissing:
        return None


@cache
def _entry_points(package: str, group: str) -> dict[str, EntryPoint]:
    try:
        return {point.name: point for point in distribution(package).entry_points.select(group=group)}
    except PackageNotFoundError:
        return {}
