"""A program of its own: runs one stdio server, and leaves no process behind of all that the server started.

Started by `process.child` with a bare interpreter: REAPER CONTROL DIRECTORY COMMAND... . CONTROL is the number of a
socket whose other end only the gateway has; DIRECTORY may be empty. It imports nothing of the gateway, so that it
costs 30 ms and 6 MB.

Rule 1: the socket is the gateway's life. When it ends, also because the gateway was killed, everything is killed.
Rule 2: everything is what descends from this process. It is a subreaper (prctl(2)): what loses its parent, or leaves
its process group and session, still descends from it. `npx server` is three processes, and only one hears of a signal
to a child.
Rule 3: the server does not outlive this process either; for that there is PR_SET_PDEATHSIG.

On the socket, to the gateway, lines: `started PID`, `failed ERRNO WHAT` (it could not be started), `ended CODE` (minus
the signal, if one killed it). From the gateway, bytes: `t` ends the server's process group, `k` kills everything.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LINUX: Final = sys.platform == "linux"
_LEFT_SECONDS: Final = 1.0
"""How long what the server leaves behind may take to end after SIGTERM."""
_KILL_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01
_UNHEARD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The gateway decides when the server ends: it drains first."""


class ChildReaper:
    """One server's parent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._server = 0
        """Its pid, and its process group's; 0 when it has ended."""

    def run(self, directory: str, command: list[str]) -> None:
        """Start the command; return when nothing of it is left."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if _LINUX else _pipe()
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _UNHEARD:
            signal.signal(number, signal.SIG_IGN)
        if _LINUX:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        failure = self._start(directory, command)
        _let_go_of_streams()
        if failure:
            self._tell(f"failed {failure}")
            return
        self._tell(f"started {self._server}")
        self._watch(woken)
        self._kill_all()

    def _start(self, directory: str, command: list[str]) -> str:
        """Start the server; "errno what" where that fails."""
        told, tell = os.pipe()
        own = os.getpid()
        self._server = os.fork()
        if not self._server:
            try:
                _become(own, directory, command)
            except OSError as exc:
                os.write(tell, f"{exc.errno} {'directory' if exc.filename == directory else 'command'}".encode())
            finally:
                os._exit(127)
        os.close(tell)
        failure = os.read(told, 100).decode()  # nothing after an exec: it closes the pipe
        os.close(told)
        return failure

    def _watch(self, woken: int) -> None:
        """Return when the gateway wants an end, when it is gone, or when nothing is left."""
        poller = select.poll()
        for file in (woken, self._control.fileno()):
            poller.register(file, select.POLLIN)
        deadline = None
        while self._reap():
            if not self._server and deadline is None:
                deadline = time.monotonic() + _LEFT_SECONDS
                for pid in _descendants():
                    _send(pid, signal.SIGTERM)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            ready = [file for file, _ in poller.poll(None if left is None else left * 1000)]
            if woken in ready:
                os.read(woken, 4096)
            if self._control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Do what the gateway says; whether to go on."""
        try:
            orders = self._control.recv(64)
        except OSError:
            return False
        if b"t" in orders and self._server:
            _send(-self._server, signal.SIGTERM)
        return bool(orders) and b"k" not in orders

    def _reap(self) -> bool:
        """Collect what has ended; whether anything is left."""
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

    def _kill_all(self) -> None:
        """Kill until nothing is left: who is killed while it forks leaves a child that was not on the list."""
        deadline = time.monotonic() + _KILL_SECONDS
        while self._reap() and time.monotonic() < deadline:
            if self._server:
                _send(-self._server, signal.SIGKILL)
            for pid in _descendants():
                _send(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _tell(self, line: str) -> None:
        try:  # noqa: SIM105 - contextlib takes a while to import
            self._control.sendall(line.encode() + b"\n")
        except OSError:
            pass  # the gateway is gone; `_watch` sees it too


def _become(parent: int, directory: str, command: list[str]) -> None:
    """Turn this new process into the server; raises OSError."""
    os.setsid()
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
    signal.set_wakeup_fd(-1)
    for number in (*_UNHEARD, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # the last two are Python's doing
    if directory:
        os.chdir(directory)
    os.execvp(command[0], command)  # noqa: S606 - what the operator configured, and no shell


def _descendants() -> list[int]:
    """All processes that descend from this one; none where there is no /proc."""
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
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # which grows as it goes
        found.extend(children.get(pid, ()))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    try:  # noqa: SIM105
        os.kill(pid, number)
    except OSError:
        pass  # it has ended, or became somebody else's by setuid


def _let_go_of_streams() -> None:
    """The server has them: as long as they were open here too, nobody would see them end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(nothing, file)


def _pipe() -> tuple[int, int]:
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    return woken, wake


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    inherited = socket.socket(fileno=int(sys.argv[1]))
    inherited.set_inheritable(False)
    try:
        ChildReaper(inherited).run(sys.argv[2], sys.argv[3:])
    finally:
        os._exit(
            0
        )  # the end of the socket and of the process are one: the gateway waits for the second after the first
