"""Where the installed program begins: before the gateway's modules, which take most of a second to import."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType

from gateway import health


def main() -> int:
    """Answer `health` at once; hand all else to the command line."""
    if sys.argv[1:2] == ["health"]:
        return health.main(sys.argv[2:])
    if os.getpid() == 1:
        # The kernel drops signals that the first process of a container does not handle. `docker stop` in the first
        # second would wait for its whole patience, and kill.
        _ = signal.signal(signal.SIGTERM, _leave)
    code: int = import_module("gateway.__main__").main()
    return code


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Nothing was served yet, so there is nothing to drain. The gateway's own handler takes over when it starts."""
    sys.exit(0)
