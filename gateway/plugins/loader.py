"""Loads the plug-ins: parts of the gateway that its core never imports.

Each is a folder beside this file and an entry point of this package, loaded when the configuration asks for it. Types
may name what is in a plug-in; no other code of the core may.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final

_PACKAGE: Final = "mrtr-gateway"
_GROUP: Final = "mrtr_gateway.plugins"


class PluginMissing(ImportError):
    """This installation of the package lacks a plug-in, or was not installed at all."""


@cache
def plugin(name: str) -> Any:
    """Return what a plug-in offers: a class or a module; raises PluginMissing, or ImportError if it lacks a library.

    Only this package's own entry points count, so no other package on the machine can put its code here.
    """
    try:
        found = tuple(distribution(_PACKAGE).entry_points.select(group=_GROUP, name=name))
    except PackageNotFoundError:
        found = ()
    if not found:
        raise PluginMissing(f"the plug-in {name} of {_PACKAGE}; `pip install {_PACKAGE}` brings it", name=name)
    return found[0].load()


def find(name: str) -> Any | None:
    """Return what a plug-in offers; None if it is missing."""
    try:
        return plugin(name)
    except PluginMissing:
        return None
