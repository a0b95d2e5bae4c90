"""Makes an installation without plug-ins of a test run: `pytest -p tests.support.without_plugins`."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from gateway.plugins import loader


class _Refusal:
    """An import of a plug-in fails, however it is written."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith("gateway.plugins.") and name != loader.__name__:
            raise ModuleNotFoundError(f"{name} is a plug-in, and there are none here", name=name)
        return None


sys.meta_path.insert(0, _Refusal())
loader._GROUP = "no plug-ins"
