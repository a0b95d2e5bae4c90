"""A separate program that runs one stdio server so that none of its processes outlives the gateway.

`process.child` starts it with a bare interpreter: REAPER CONTROL DIRECTORY COMMAND... . CONTROL is the file descriptor
of a socket whose other end only the gateway has. DIRECTORY may be empty. The program imports nothing of the gateway,
so it costs 30 ms and 6 MB.

Rule 1: when the socket closes, even because the gateway was killed, the reaper kills all its descendants.
Rule 2: the reaper is a subreaper (prctl(2)), so a process that loses its parent, or leaves its process group and
session, still descends from it. `npx server` is three processes, and a signal to the child reaches only one of them.
Rule 3: the server does not outlive the reaper either (PR_SET_PDEATHSIG).

Lines to the gateway: `started PID`, `failed ERRNO WHAT` if the start failed, `ended CODE`, where CODE is the negative
signal number if a signal killed the server. Bytes from the gateway: `t` sends SIGTERM to the server's process group,
`k` kills everything.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from typing import Final

PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LINUX: Final = sys.platform == "linux"
_LEFT_SECONDS: Final = 1.0
"""How long processes that the server leaves behind may take to exit after SIGTERM."""
_KILL_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01
_NEVER: Final = float("inf")
_IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Ignored, because the gateway decides when the server ends: it drains first."""


class ProcessTreeReaper:
    """The parent process of one server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._server = 0
        """The pid of the server, also of its process group; 0 once it has exited."""

    def run(self, directory: str, command: list[str]) -> None:
        """Start the command; return when none of its processes is left."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, Python writes nothing to the wakeup fd
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        if _LINUX:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
        failure = self._start(directory, command)
        # The server has the pipes now, and open copies would hide their end from the gateway.
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in range(3):
            os.dup2(nothing, file)
        if failure:
            self._tell(f"failed {failure}")
            return
        self._tell(f"started {self._server}")
        self._watch(woken)
        deadline = time.monotonic() + _KILL_SECONDS
        while self._reap() and time.monotonic() < deadline:
            if self._server:  # 0 would be the reaper's own process group
                _send(-self._server, signal.SIGKILL)
            for pid in _descendants():
                _send(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)  # then again: one that was killed while it forked leaves a child unlisted

    def _start(self, directory: str, command: list[str]) -> str:
        """Start the server; return "ERRNO WHAT" if that fails, or else an empty string."""
        told, tell = os.pipe()
        own = os.getpid()
        self._server = os.fork()
        if not self._server:
            try:
                _become(own, directory, command)
            except OSError as exc:
                os.write(tell, f"{exc.errno} {'directory' if exc.filename == directory else 'command'}".encode())
            finally:
                os._exit(127)  # a fork must not run the code of the reaper
        os.close(tell)
        failure = os.read(told, 100).decode()  # empty after a successful exec, which closes the pipe
        os.close(told)
        return failure

    def _watch(self, woken: int) -> None:
        """Return when the gateway orders the end, when it is gone, or when no process is left."""
        poller = select.poll()
        poller.register(woken, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        deadline = _NEVER
        while self._reap():
            if not self._server and deadline == _NEVER:
                deadline = time.monotonic() + _LEFT_SECONDS
                for pid in _descendants():
                    _send(pid, signal.SIGTERM)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            ready = dict(poller.poll(None if left == _NEVER else left * 1000))
            if woken in ready:
                os.read(woken, 4096)
            if self._control.fileno() in ready:
                try:
                    orders = self._control.recv(64)
                except OSError:
                    return
                if b"t" in orders and self._server:
                    _send(-self._server, signal.SIGTERM)
                if not orders or b"k" in orders:
                    return

    def _reap(self) -> bool:
        """Collect processes that exited; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self._server:
                self._server = 0
                self._tell(f"ended {os.waitstatus_to_exitcode(status)}")

    def _tell(self, line: str) -> None:
        try:  # noqa: SIM105 - importing contextlib takes time
            self._control.sendall(line.encode() + b"\n")
        except OSError:
            pass  # the gateway is gone; `_watch` sees it too


def _become(parent: int, directory: str, command: list[str]) -> None:
    """Turn this new process into the server; raises OSError."""
    os.setsid()
    if _LINUX:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the reaper died before prctl, so no signal will come
            os._exit(127)
    signal.set_wakeup_fd(-1)
    for number in (*_IGNORED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python changed the last two
    if directory:
        os.chdir(directory)
    os.execvp(command[0], command)  # noqa: S606 - the operator configured the command; no shell


def _descendants() -> list[int]:
    """Return all descendants of this process; none if there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib takes 10 ms to import
    except OSError:
        return []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # proc_pid_stat(5): pid (name) state ppid; the name may have spaces and brackets.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it exited meanwhile
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # the list grows during the loop
        found.extend(children.get(pid, ()))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    try:  # noqa: SIM105
        os.kill(pid, number)
    except OSError:
        pass  # it exited, or runs as another user after setuid


def prctl(option: int, value: int) -> None:
    """Change a property of this process; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    inherited = socket.socket(fileno=int(sys.argv[1]))
    inherited.set_inheritable(False)
    try:
        ProcessTreeReaper(inherited).run(sys.argv[2], sys.argv[3:])
    finally:
        os._exit(0)  # at once: the gateway waits for this process as soon as the socket is closed
