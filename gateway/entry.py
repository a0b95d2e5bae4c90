"""The entry point of the installed program; it runs before the gateway's modules, which import slowly."""

import os
import signal
import sys
from importlib import import_module

from gateway import container_health


def main() -> int:
    """Run `health` at once; pass everything else to the command line."""
    if sys.argv[1:2] == ["health"]:
        return container_health.main(sys.argv[2:])
    if os.getpid() == 1:
        # The kernel drops signals that process 1 of a container does not handle. Without this, `docker stop` in the
        # first second would wait for its whole timeout and then kill. There is nothing to drain yet; the gateway
        # installs its own handler when it starts.
        _ = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if sys.argv[1:2] == ["serve"]:
        # A reload that is asked for during the start would end the process. `serve` unblocks it with its handler.
        _ = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    code: int = import_module("gateway.__main__").main()
    return code
