"""`make plant`: plants one fault after another in a copy of the gateway, and tells how soon the oracle notices it."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from tests.simulation.history import History
from tests.simulation.oracle import complaints
from tests.simulation.plan import draw

ROOT: Final = Path(__file__).parents[2]


class Planted(NamedTuple):
    """A fault: in this file, the text `before` is replaced."""

    name: str
    file: str
    before: str
    after: str


_DRAINS: Final = frozenset({"term", "term twice", "int"})
_SILENCES: Final = frozenset({"part", "one way", "peers", "stop", "power"})
_DEATHS: Final = frozenset({"kill", "power", *_DRAINS})
_MET_BY: Final = {
    "drain": _DRAINS,
    "peers": _SILENCES | _DEATHS,
    "seal": frozenset({"replay"}),
    "takeover": _SILENCES,
}
"""Without one of these faults no history can notice one of this area."""
_NEEDS: Final = {"children": "has_children", "listeners": "listeners", "subscriptions": "listeners", "tasks": "tasks"}
"""What of a plan no history can notice one of this area without."""
_PLANTED: Final[dict[str, dict[str, str | tuple[str, str]]]] = {
    "exchange/machine.py": {
        "exchange: a repeated answer is not compared with the first": (
            "        if self._digests.get(event.round) != event.digest:\n",
            "        if False:\n",
        ),
        "exchange: the questions of a round are not shown again": (
            "            return self._ask_again(event.leg)\n        if not is_broken:",
            "            return self._ask(PARKED)\n        if not is_broken:",
        ),
        "exchange: a call that breaks is not cancelled": (
            'self._cancel("the gateway cannot read the result any more") if event.runs_on else []',
            "[]",
        ),
        "exchange: a run is not cancelled before the next": (
            "        out: Commands = self._cancel(_AGAIN) if runs_on else []\n",
            "        out: Commands = []\n",
        ),
        "exchange: expiry does not cancel": (
            'return self._part("the client did not answer in time")',
            "return self._part(None)",
        ),
        "exchange: a retry that came twice gets no reply": "self.legs += (event.leg,)",
        "exchange: the time to live is not armed": ("    PARKED: (TTL, COLD),\n", "    PARKED: (COLD,),\n"),
        "exchange: a call that must not be repeated is run again": (
            "if not event.replayable or not self._ledger.can_run_again:",
            "if not self._ledger.can_run_again:",
        ),
        "exchange: a leg that left still counts": (
            "        self.legs = tuple(leg for leg in self.legs if leg is not event.leg)\n        if self.legs:\n",
            "        if len(self.legs) > 1:\n",
        ),
        "exchange: the final message is not kept for a repeated retry": "self._final = final",
        "exchange: who leaves the first retry is taken for one that cannot come back": (
            "        if self.round == 0:\n            # The client has no",
            "        if self.round <= 1:\n            # The client has no",
        ),
        "exchange: answers are not on record": "self._ledger.note(matched, self.round)",
    },
    "engine/engine.py": {
        "exchange: the timers of a state go on in the next one": (
            "                self._disarm(timer)\n",
            "                pass\n",
        ),
        "timers: grace ends though the process was stopped": (
            "if timer is GRACE and now - due > STALLED_SECONDS:",
            "if False:",
        ),
    },
    "bridge/driver.py": {
        "takeover: others are not asked before a cancel": (
            "        if is_left and self._upstream_call.may_be_resumed_elsewhere:\n",
            "        if False:\n",
        ),
        "takeover: who only asked again for a silent owner keeps the call": (
            "        if self._exchange.state is RESTORED and not is_proven:\n",
            "        if False:\n",
        ),
        "takeover: the state of a re-ask names the stand-in": (
            "begun.left(self.live.config) if begun is not None and self._exchange.state is RESTORED else None",
            "None",
        ),
        "bridge: the bytes of a call are not given back": (
            "        self._weight.release()\n        self._upstream_call.end()\n",
            "        self._upstream_call.end()\n",
        ),
        "drain: calls that others can resume are cancelled": (
            "        self._feed(on.LetGo(cancel=not is_resumable))\n        return True",
            "        self._feed(on.LetGo(cancel=True))\n        return True",
        ),
        "bridge: a call that goes cold is forgotten": "self._lot.cold.add(record)",
    },
    "downstream/continuation.py": {
        "takeover: the former owner keeps a lost call": (
            "if driver is None or envelope.owner == self._process.owner or not driver.is_behind(envelope):",
            "if True:",
        ),
        "peers: a restarted owner does not say that the call is gone": (
            "self._process.is_own(envelope.owner, envelope.epoch)",
            "envelope.owner == self._process.owner",
        ),
    },
    "sessions/session.py": {
        "sessions: a session is ended under its call": (
            "return is_ours and not (shared.must_not_end or shared.joiners or self.pending)",
            "return is_ours",
        ),
        "sessions: the session of a call that was given up is used and ended": "self.shared.owner.lose()",
    },
    "sessions/pool/pool.py": {
        "sessions: an adopted session is kept": (
            "session.lost or session.adopted or self.closed",
            "session.lost or self.closed",
        ),
        "sessions: idle sessions are not swept": (
            "                self._drop(session)\n            if group.is_empty",
            "                break\n            if group.is_empty",
        ),
        "sessions: who joined a session does not leave it": (
            "joiner.shared.leave(joiner, is_lost=not (clean or joiner.is_orderly))"
        ),
        "sessions: a session in quarantine is not dropped": (
            "        self._drop(session)\n        session.abandon()\n",
            "        session.abandon()\n",
        ),
        "sessions: the place of a session that cannot be opened is not given back": (
            "        except BaseException as exc:\n            self._drop(session)\n",
            "        except BaseException as exc:\n",
        ),
    },
    "cluster/peer_connections.py": {
        "peers: silence is death": ("            return self.slow(member)\n", "            return PeerDead(member)\n"),
    },
    "cluster/router.py": {
        "peers: no witness is needed": (
            "if not is_unlisted and (exc.is_local or not await self._witness.confirms(owner)):",
            "if False:",
        ),
        "peers: a silent owner's call is taken for a dead one's": (
            '                kind = "resume"\n        candidates',
            "                pass\n        candidates",
        ),
        "resume: who is asked to resume a call takes its owner for dead": (
            'return TakeOver(proven=kind == "heir")',
            "return TakeOver(proven=True)",
        ),
    },
    "cluster/witness.py": {
        "peers: a witness that reached the owner does not count": (
            '"silent" in words and "reached" not in words',
            '"silent" in words',
        ),
    },
    "server/peer_listener.py": {
        "peers: who is asked about a call never has it": 'return "yes"',
    },
    "http_client/idle_connections.py": {
        "http: a connection is used however long it was idle": (
            "            if not (is_repeatable or now - since < sure_seconds or ",
            "            if not (True or ",
        ),
        "http: a connection is used until the moment at which its server closes it": (
            "    return seconds - min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)\n",
            "    return seconds\n",
        ),
    },
    "http_client/connection.py": {
        "http: the listener of a request does not hear that it failed": "listener.on_failed(failure)",
        "http: what was heard of one reply counts for the next": (
            "        self._reader = self._familiar if isinstance(rest, (str, MalformedReply)) else rest\n",
            "        if not isinstance(rest, (str, MalformedReply)):\n            self._reader = rest\n",
        ),
    },
    "upstream/http/reply_reader.py": {
        "http: the end of a stream that is followed is not noticed": (
            "            self._end(failure)\n",
            "            pass\n",
        ),
    },
    "protocol/sse.py": {
        "http: what is left of a line is dropped": (
            "self._unfinished = bytearray(chunk[end:])",
            "self._unfinished = bytearray()",
        ),
    },
    "server/drain.py": {
        "drain: waiting legs are not handed over": "driver.hand_over()",
        "drain: nobody is told that the calls were let go": "gateway.draining.part(let_go)",
        "drain: new calls are begun until the end": "draining.begin(None if alone else world.monotonic() + seconds)",
        "drain: calls that nobody can continue are forgotten": "driver.stop(error)",
    },
    "bridge/upstream_call.py": {
        "timers: a silent server is not noticed": "self._listener.hear(on.Stopped(silent))",
        "timers: the client's time counts as the server's silence": "self._call.stirs()",
        "bridge: an answer that was refused is lost": (
            "self._listener.hear(on.Undelivered(left, exc, retryable, replayable, self._may_run_on()))"
        ),
    },
    "runtime/coarse_timer.py": {
        "timers: an alarm that rang is not set again": "self.set(following)",
        "timers: a time that is restarted ends when it would have": (
            "            del waiting[key]  # the dict must stay in the order of the deadlines\n",
            "            return\n",
        ),
        "timers: a key that was disarmed rings": "self._waiting.pop(key, None)",
    },
    "mirror/call_rounds.py": {
        "mirror: the answers of a round are sent with the next": (
            "        self.progress = progress\n        self.answers = {}\n",
            "        self.progress = progress\n",
        ),
        "mirror: the state of the server is not brought back": 'added["requestState"] = self.progress.state',
    },
    "seal/peer_messages.py": {
        "seal: a message between replicas is accepted twice": (
            "        if request.once in self._seen:\n",
            "        if False:\n",
        ),
    },
    "bridge/subscription.py": {
        "subscriptions: a new session tells nothing": "self.missed()",
        "subscriptions: a lost session is not replaced": "self._stream_ended.set()",
        "subscriptions: a session is not given back": (
            'self._live.process.tasks.spawn(self._unsubscribe(session), "close subscription")'
        ),
        "subscriptions: what was not asked for is passed on": (" or (method, uri) not in self._topics:\n", ":\n"),
    },
    "mirror/streamable/session_homes.py": {
        "listeners: the last event id brings no subscriptions": "self._changes.add(subscribed)",
        "listeners: a stream that was opened again tells nothing": (
            "            if self._had_stream:\n                self._changes.tell_all",
            "            if False:\n                self._changes.tell_all",
        ),
    },
    "mirror/change_subscription.py": {
        "listeners: a subscription that broke is not opened again": (
            "self._stream, has_missed = None, True",
            "return",
        ),
    },
    "downstream/rejections.py": {
        "listeners: an error is written into a standalone stream": "reply.break_off()",
    },
    "tasks/task_call.py": {
        "tasks: a cancellation does not reach the server": "_ = await self._attempt(driven.cancel())",
    },
    "exchange/nested_requests.py": {
        "tasks: a question stays open after its answer": "_ = self.open.pop(question.key, None)",
    },
    "downstream/task_requests.py": {
        "tasks: no replica goes on with a task of another one": (
            "    task.go_on(handle, sealed, is_shared=not found.proven)\n    return task\n",
            "    raise UnknownTask\n",
        ),
    },
    "tasks/follower.py": {
        "tasks: the first failure loses a task": (
            "                if failures > len(TASK_AGAIN_SECONDS):\n",
            "                if failures:\n",
        ),
    },
    "tasks/live_task.py": {
        "tasks: a task is kept after its time": (
            "            self._arm(TTL, max(self._handle.expires - world.wall(), 0))\n",
            "            self._disarm(TTL)\n",
        ),
        "tasks: the end of a task is not heard": "self._feed(on.Resulted(self._modern(Raw(result))))",
    },
    "children/child.py": {
        "children: a call waits on when its child has ended": (
            "asyncio.wait((answered, self.over), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)",
            "asyncio.wait((answered,), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)",
        ),
    },
    "upstream/stdio.py": {
        "children: a session that ends leaves its child": (
            '        """End the child."""\n        if self._started:\n',
            '        """End the child."""\n        if False:\n',
        ),
    },
    "children/launcher.py": {
        "children: one that is asked for its era has another one started": (
            "        self._lent += 1\n",
            "        self._lent += 0\n",
        ),
    },
}
"""Per file the faults by name, which begins with an area: a statement that is left out, or a text and what it becomes.

The statement, or the text, occurs once."""
FAULTS: Final = tuple(
    Planted(name, file, *((row, "pass") if isinstance(row, str) else row))
    for file, rows in _PLANTED.items()
    for name, row in rows.items()
)


def noticed(fault: Planted, most: int, seconds: float) -> str:
    """The number of histories after which the oracle complains, and what it says."""
    until = time.process_time() + seconds
    area = fault.name.split(":")[0]
    for seed in range(most):
        plan = draw(seed)
        if area in _MET_BY and not _MET_BY[area] & {each.kind for each in plan.faults}:
            continue
        if area in _NEEDS and not getattr(plan, _NEEDS[area]):
            continue
        found = complaints(History(plan).run())
        if found:
            return f"{seed + 1}: {found[0][:110]}"
        if time.process_time() > until:
            return f"not within {seed + 1}"
    return f"not within {most}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="plant only faults whose names contain one of these")
    parser.add_argument("--most", type=int, default=600, help="histories for each fault")
    parser.add_argument("--seconds", type=float, default=600.0, help="processor time for each fault")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here is not None:
        print(noticed(next(each for each in FAULTS if each.name == args.here), args.most, args.seconds))
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("gateway", "tests/simulation"):
            _ = shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for fault in FAULTS:
            if not args.names or any(name in fault.name for name in args.names):
                said = _plant(copy, fault, args.most, args.seconds)
                unnoticed += not said[:1].isdigit()
                print(f"{fault.name}: {said}", flush=True)
    return bool(unnoticed)


def _plant(copy: Path, fault: Planted, most: int, seconds: float) -> str:
    file = copy / "gateway" / fault.file
    text = file.read_text()
    _ = file.write_text(text.replace(fault.before, fault.after))
    command = (sys.executable, "-m", __spec__.name, "--here", fault.name, "--most", str(most))
    command += ("--seconds", str(seconds))
    try:
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    finally:
        _ = file.write_text(text)
    return run.stdout.strip() or f"1: {run.stderr.strip().splitlines()[-1]}"


if __name__ == "__main__":
    sys.exit(main())
