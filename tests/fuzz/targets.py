"""The pure targets: what a target is, what counts as a finding, and the list of them."""

import hashlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import gateway
from tests.fuzz import content_targets, protocol_targets, trust_targets

_GATEWAY: Final = Path(gateway.__file__).parent
CORPUS: Final = Path(__file__).parent / "corpus"


class Finding(NamedTuple):
    """One broken promise."""

    signature: str
    """What two inputs with the same cause have in common."""
    trace: str


class Target(NamedTuple):
    """One part of the gateway under attack.

    `check` takes any bytes. It returns if the part kept its promises for them, and raises anything else than the
    documented error, or AssertionError, if it did not.
    """

    name: str
    check: Callable[[bytes], None]

    def seeds(self) -> list[bytes]:
        """The inputs of the corpus, in the order of their names."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]

    def judge(self, data: bytes) -> Finding | None:
        """Run the target on one input; the finding, if it is one."""
        try:
            self.check(data)
        except Exception as exc:  # noqa: BLE001  (whatever a target raises is a finding)
            return Finding(_signature(exc), "".join(traceback.format_exception(exc, limit=-6)))
        return None


def _signature(exc: BaseException) -> str:
    """Where the error came from: its type, and the innermost function of the gateway or the oracle's words.

    The text of an error often quotes the input, so it is left out. Two inputs with one signature count as one finding.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_GATEWAY)]
    last = frames[-1]
    if isinstance(exc, AssertionError) and Path(last.filename).is_relative_to(CORPUS.parent):
        return f"AssertionError: {last.line}"
    inner = ours[-1] if ours else last
    return f"{type(exc).__name__} in {inner.name}"


class Findings:
    """What was found in a campaign: each kind is saved in a folder and printed, once."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def report(self, what: str, data: bytes, detail: str = "") -> None:
        """Save the input that showed it, unless this kind was seen before."""
        if what in self._seen:
            return
        self._seen.add(what)
        path = self._folder / f"{self._name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        print(f"FINDING {what}\n{path}\n{detail}", flush=True)


TARGETS: Final = {
    target.name: target
    for target in (
        Target("request", protocol_targets.read_request),
        Target("sse", protocol_targets.event_stream),
        Target("jsonrpc", protocol_targets.json_rpc),
        Target("stdio", protocol_targets.stdio_lines),
        Target("parameters", protocol_targets.tool_parameters),
        Target("state", trust_targets.sealed_state),
        Target("mirror", trust_targets.mirror_token),
        Target("peer", trust_targets.peer_message),
        Target("host", trust_targets.host_and_origin),
        Target("token", trust_targets.bearer_token),
        Target("result", content_targets.result),
        Target("question", content_targets.question),
        Target("config", content_targets.configuration),
    )
}
