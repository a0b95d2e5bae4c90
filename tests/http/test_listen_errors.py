"""A gateway that cannot listen names the key, the cause and the fix."""

import errno
import json
import socket

import pytest

from gateway.config import parse
from gateway.http.server.listen_errors import explained

CONFIG = parse(
    json.dumps(
        {
            "listen": "127.0.0.1:80",
            "admin": "127.0.0.1:81",
            "replica": {"id": "a", "listen": "127.0.0.1:82"},
            "routes": [{"upstream": {"url": "http://127.0.0.1:9/mcp"}}],
        }
    ),
    "test",
    {},
)


@pytest.mark.parametrize(
    ("exc", "cause", "fix"),
    [
        (OSError(errno.EADDRINUSE, "x"), "another process uses it", "choose another port"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "this machine does not have the address", "0.0.0.0 for all of them"),
        (PermissionError(errno.EACCES, "x"), "permission denied", "CAP_NET_BIND_SERVICE"),
        (socket.gaierror(-2, "Name or service not known"), "the name cannot be resolved (Name", "write an IP address"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files", "choose another address"),
    ],
)
@pytest.mark.parametrize(("port", "key"), [(80, "listen"), (81, "admin"), (82, "replica.listen")])
def test_the_error_names_the_key_the_cause_and_the_fix(
    exc: OSError, cause: str, fix: str, port: int, key: str
) -> None:
    with pytest.raises(OSError, match="cannot listen") as caught, explained(CONFIG, f"127.0.0.1:{port}"):
        raise exc
    assert caught.value.errno == exc.errno
    assert caught.value.strerror.startswith(f"cannot listen at 127.0.0.1:{port} ({key}): {cause}")
    assert fix in caught.value.strerror


def test_a_socket_between_workers_has_no_key() -> None:
    says = "cannot listen at unix:/tmp/peer.sock: another process uses it"
    with pytest.raises(OSError, match=says), explained(CONFIG, "unix:/tmp/peer.sock"):
        raise OSError(errno.EADDRINUSE, "x")
