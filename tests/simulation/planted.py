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
    """A fault: in this file, the text `before` is replaced, which occurs in it once."""

    name: str
    file: str
    before: str
    after: str
    met_by: frozenset[str] = frozenset()
    """Without one of these faults no history can notice it; empty if any can."""
    needs: str = ""
    """What of a plan no history can notice it without."""


_DRAINS: Final = frozenset({"term", "term twice", "int"})
_SILENCES: Final = frozenset({"part", "one way", "peers", "stop", "power"})
_DEATHS: Final = frozenset({"kill", "power", *_DRAINS})
_MACHINE: Final = "exchange/machine.py"
FAULTS: Final = (
    Planted(
        "exchange: a repeated answer is not compared with the first",
        _MACHINE,
        "        if self._digests.get(event.round) != event.digest:\n",
        "        if False:\n",
    ),
    Planted(
        "exchange: the questions of a round are not shown again",
        _MACHINE,
        "            return self._ask_again(event.leg)\n        if not is_broken:",
        "            return self._ask(PARKED)\n        if not is_broken:",
    ),
    Planted(
        "exchange: a call that breaks is not cancelled",
        _MACHINE,
        'self._cancel("the gateway cannot read the result any more") if event.runs_on else []',
        "[]",
    ),
    Planted(
        "exchange: a run is not cancelled before the next",
        _MACHINE,
        "        out: Commands = self._cancel(_AGAIN) if runs_on else []\n",
        "        out: Commands = []\n",
    ),
    Planted(
        "exchange: expiry does not cancel",
        _MACHINE,
        'return self._give_up("the client did not answer in time")',
        "return self._part(None)",
    ),
    Planted(
        "exchange: a retry that came twice gets no reply",
        _MACHINE,
        "        self.legs += (event.leg,)\n",
        "",
    ),
    Planted(
        "exchange: the time to live is not armed",
        _MACHINE,
        "    PARKED: (TTL, COLD),\n",
        "    PARKED: (COLD,),\n",
    ),
    Planted(
        "exchange: a call that must not be repeated is run again",
        _MACHINE,
        "if not event.replayable or not self._ledger.can_run_again:",
        "if not self._ledger.can_run_again:",
    ),
    Planted(
        "exchange: the timers of a state go on in the next one",
        "engine/engine.py",
        "                self._disarm(timer)\n",
        "                pass\n",
    ),
    Planted(
        "exchange: a leg that left still counts",
        _MACHINE,
        "        self.legs = tuple(leg for leg in self.legs if leg is not event.leg)\n        if self.legs:\n",
        "        if len(self.legs) > 1:\n",
    ),
    Planted(
        "exchange: the final message is not kept for a repeated retry",
        _MACHINE,
        "        self._final = final\n",
        "",
    ),
    Planted(
        "bridge: others are not asked before a cancel",
        "bridge/driver.py",
        "        if is_left and self._upstream_call.may_be_resumed_elsewhere:\n",
        "        if False:\n",
        _SILENCES,
    ),
    Planted(
        "bridge: the former owner keeps a lost call",
        "downstream/continuation.py",
        "if driver is None or envelope.owner == self._process.owner or not driver.is_behind(envelope):",
        "if True:",
        _SILENCES,
    ),
    Planted(
        "bridge: who only asked again for a silent owner keeps the call",
        "bridge/driver.py",
        "        if self._exchange.state is RESTORED and not is_proven:\n",
        "        if False:\n",
        _SILENCES,
    ),
    Planted(
        "bridge: the state of a re-ask names the stand-in",
        "bridge/driver.py",
        "self._takeover.left if self._takeover is not None and self._exchange.state is RESTORED else None",
        "None",
        _SILENCES,
    ),
    Planted(
        "bridge: the bytes of a call are not given back",
        "bridge/driver.py",
        "        self._weight.release()\n        self._upstream_call.end()\n",
        "        self._upstream_call.end()\n",
    ),
    Planted(
        "sessions: a session is ended under its call",
        "sessions/session.py",
        "return is_ours and not (shared.must_not_end or shared.joiners or self.pending)",
        "return is_ours",
    ),
    Planted(
        "sessions: an adopted session is kept",
        "sessions/pool/pool.py",
        "session.lost or session.adopted or self.closed",
        "session.lost or self.closed",
    ),
    Planted(
        "sessions: idle sessions are not swept",
        "sessions/pool/pool.py",
        "                self._drop(session)\n            if group.is_empty",
        "                break\n            if group.is_empty",
    ),
    Planted(
        "sessions: the session of a call that was given up is used and ended",
        "sessions/session.py",
        "            self.shared.owner.lose()\n",
        "            pass\n",
    ),
    Planted(
        "sessions: who joined a session does not leave it",
        "sessions/pool/pool.py",
        "        joiner.shared.leave(joiner)\n",
        "",
    ),
    Planted(
        "peers: silence is death",
        "cluster/peer_connections.py",
        "            return self.slow(member)\n",
        "            return PeerDead(member)\n",
        _SILENCES | _DEATHS,
    ),
    Planted(
        "peers: a restarted owner does not say that the call is gone",
        "downstream/continuation.py",
        "self._process.is_own(envelope.owner, envelope.epoch)",
        "envelope.owner == self._process.owner",
        _SILENCES | _DEATHS,
    ),
    Planted(
        "peers: no witness is needed",
        "cluster/router.py",
        "if not is_unlisted and (exc.is_local or not await self._witness.confirms(owner)):",
        "if False:",
        _SILENCES | _DEATHS,
    ),
    Planted(
        "peers: a witness that reached the owner does not count",
        "cluster/witness.py",
        '"silent" in words and "reached" not in words',
        '"silent" in words',
        _SILENCES | _DEATHS,
    ),
    Planted(
        "peers: who is asked about a call never has it",
        "cluster/witness.py",
        'own = "yes" if found is not None and found.has_taken_over(round_) else "no"',
        'own = "no"',
        _SILENCES | _DEATHS,
    ),
    Planted(
        "peers: a silent owner's call is taken for a dead one's",
        "cluster/router.py",
        '                kind = "resume"\n        candidates',
        "                pass\n        candidates",
        _SILENCES | _DEATHS,
    ),
    Planted(
        "http: a connection is used however long it was idle",
        "http_client/idle_connections.py",
        "            if not (is_sure or is_repeatable):\n",
        "            if False:\n",
    ),
    Planted(
        "http: a connection is used until the moment at which its server closes it",
        "http_client/idle_connections.py",
        "    return seconds - min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)\n",
        "    return seconds\n",
    ),
    Planted(
        "http: the listener of a request does not hear that it failed",
        "http_client/connection.py",
        "            listener.on_failed(failure)\n",
        "            pass\n",
    ),
    Planted(
        "http: the end of a stream that is followed is not noticed",
        "upstream/http/reply_reader.py",
        "            self._end(failure)\n",
        "            pass\n",
    ),
    Planted(
        "http: what is left of a line is dropped",
        "protocol/sse.py",
        "self._unfinished = bytearray(chunk[end:])",
        "self._unfinished = bytearray()",
    ),
    Planted(
        "drain: waiting legs are not handed over",
        "server/drain.py",
        "                driver.hand_over()\n",
        "                pass\n",
        _DRAINS,
    ),
    Planted(
        "drain: calls that others can resume are cancelled",
        "bridge/driver.py",
        "        self._feed(on.LetGo(cancel=not is_resumable))\n        return True",
        "        self._feed(on.LetGo(cancel=True))\n        return True",
        _DRAINS,
    ),
    Planted(
        "drain: nobody is told that the calls were let go",
        "server/drain.py",
        "    gateway.draining.part(let_go, is_resumable=gateway.is_resumable)\n",
        "",
        _DRAINS,
    ),
    Planted(
        "drain: new calls are begun until the end",
        "server/drain.py",
        "    draining.begin(None if alone else world.monotonic() + seconds)\n",
        "",
        _DRAINS,
    ),
    Planted(
        "drain: calls that nobody can continue are forgotten",
        "server/drain.py",
        "            driver.stop(error)\n",
        "            pass\n",
        _DRAINS,
    ),
    Planted(
        "timers: a silent server is not noticed",
        "bridge/upstream_call.py",
        "        self._listener.hear(on.Stopped(silent))\n",
        "",
    ),
    Planted(
        "timers: an alarm that rang is not set again",
        "runtime/coarse_timer.py",
        "                self.set(following)\n",
        "                pass\n",
    ),
    Planted(
        "timers: a time that is restarted ends when it would have",
        "runtime/coarse_timer.py",
        "            del waiting[key]  # the dict must stay in the order of the deadlines\n",
        "            return\n",
    ),
    Planted(
        "timers: a key that was disarmed rings",
        "runtime/coarse_timer.py",
        "        self._waiting.pop(key, None)\n",
        "",
    ),
    Planted(
        "timers: the client's time counts as the server's silence",
        "bridge/upstream_call.py",
        "            self._call.heard = world.monotonic()  # until now the client was silent, not the upstream\n",
        "            pass\n",
    ),
    Planted(
        "timers: grace ends though the process was stopped",
        "engine/engine.py",
        "if timer is GRACE and now - due > STALLED_SECONDS:",
        "if False:",
    ),
    Planted(
        "exchange: who leaves the first retry is taken for one that cannot come back",
        _MACHINE,
        "        if self.round == 0:\n            # The client has no",
        "        if self.round <= 1:\n            # The client has no",
    ),
    Planted(
        "exchange: answers are not on record",
        _MACHINE,
        "        self._ledger.note(matched, self.round)\n        self._ledger.note(late, self.round, sent=is_broken)",
        "        self._ledger.note(late, self.round, sent=is_broken)",
    ),
    Planted(
        "bridge: a call that goes cold is forgotten",
        "bridge/driver.py",
        "        self._lot.cold.add(record)\n",
        "",
    ),
    Planted(
        "bridge: an answer that was refused is lost",
        "bridge/upstream_call.py",
        "self._listener.hear(on.Undelivered(left, exc, retryable, replayable, self._may_run_on()))\n",
        "pass\n",
    ),
    Planted(
        "sessions: a session in quarantine is not dropped",
        "sessions/pool/pool.py",
        "        self._drop(session)\n        session.abandon()\n",
        "        session.abandon()\n",
    ),
    Planted(
        "sessions: the place of a session that cannot be opened is not given back",
        "sessions/pool/pool.py",
        "        except BaseException as exc:\n            self._drop(session)\n",
        "        except BaseException as exc:\n",
    ),
    Planted(
        "peers: who is asked to resume a call takes its owner for dead",
        "cluster/router.py",
        'return TakeOver(proven=kind == "heir")',
        "return TakeOver(proven=True)",
    ),
    Planted(
        "http: what was heard of one reply counts for the next",
        "http_client/connection.py",
        "        self._heard = False\n        self._requests",
        "        self._requests",
    ),
    Planted(
        "mirror: the answers of a round are sent with the next",
        "mirror/call_rounds.py",
        "        self.progress = progress\n        self.answers = {}\n",
        "        self.progress = progress\n",
    ),
    Planted(
        "mirror: the state of the server is not brought back",
        "mirror/call_rounds.py",
        '            added["requestState"] = self.progress.state\n',
        "            pass\n",
    ),
    Planted(
        "seal: a message between replicas is accepted twice",
        "seal/peer_messages.py",
        "        if nonce in self._seen:\n",
        "        if False:\n",
        frozenset({"replay"}),
    ),
    Planted(
        "subscriptions: a new session tells nothing",
        "bridge/subscription.py",
        "                self.missed()\n",
        "                pass\n",
        needs="listeners",
    ),
    Planted(
        "subscriptions: a lost session is not replaced",
        "bridge/subscription.py",
        "        self._stream_ended.set()\n",
        "        pass\n",
        needs="listeners",
    ),
    Planted(
        "subscriptions: a session is not given back",
        "bridge/subscription.py",
        '            self._live.process.tasks.spawn(self._unsubscribe(session), "close subscription")\n',
        "            pass\n",
        needs="listeners",
    ),
    Planted(
        "subscriptions: what was not asked for is passed on",
        "bridge/subscription.py",
        " or (method, uri) not in self._topics:\n",
        ":\n",
        needs="listeners",
    ),
    Planted(
        "mirror: the last event id brings no subscriptions",
        "mirror/streamable/session_homes.py",
        "            self._changes.add(subscribed)\n",
        "            pass\n",
        needs="listeners",
    ),
    Planted(
        "mirror: a stream that was opened again tells nothing",
        "mirror/streamable/session_homes.py",
        "            if self._had_stream:\n                self._changes.tell_all",
        "            if False:\n                self._changes.tell_all",
        needs="listeners",
    ),
    Planted(
        "mirror: a subscription that broke is not opened again",
        "mirror/change_subscription.py",
        "        self._start_reopening(has_missed=True)\n",
        "        pass\n",
        needs="listeners",
    ),
    Planted(
        "mirror: an error is written into a standalone stream",
        "downstream/rejections.py",
        "            reply.break_off()\n",
        "            pass\n",
        needs="listeners",
    ),
    Planted(
        "tasks: a cancellation does not reach the server",
        "tasks/task_call.py",
        "        self._enqueue(self._cancel_task, driven)\n",
        "",
        needs="tasks",
    ),
    Planted(
        "tasks: a question stays open after its answer",
        "exchange/nested_requests.py",
        "            _ = self.open.pop(question.key, None)\n",
        "",
        needs="tasks",
    ),
    Planted(
        "tasks: no replica goes on with a task of another one",
        "downstream/task_requests.py",
        "        task.go_on(handle, sealed, is_shared=not found.proven)\n        return task\n",
        "        raise UnknownTask\n",
        needs="tasks",
    ),
    Planted(
        "tasks: the first failure loses a task",
        "tasks/follower.py",
        "                if failures > len(_PAUSES):\n",
        "                if failures:\n",
        needs="tasks",
    ),
    Planted(
        "tasks: a task is kept after its time",
        "tasks/live_task.py",
        "            self._arm(TTL, max(self._handle.expires - world.wall(), 0))\n",
        "            self._disarm(TTL)\n",
        needs="tasks",
    ),
    Planted(
        "tasks: the end of a task is not heard",
        "tasks/live_task.py",
        "                    self._feed(on.Resulted(self._modern(Raw(result))))\n",
        "                    pass\n",
        needs="tasks",
    ),
    Planted(
        "children: a call waits on when its child has ended",
        "children/child.py",
        "asyncio.wait((answered, self.over), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)",
        "asyncio.wait((answered,), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)",
        frozenset({"child"}),
        needs="has_children",
    ),
    Planted(
        "children: a session that ends leaves its child",
        "upstream/stdio.py",
        '        """End the child."""\n        if self._started:\n',
        '        """End the child."""\n        if False:\n',
        needs="has_children",
    ),
    Planted(
        "children: one that is asked for its era has another one started",
        "children/launcher.py",
        "        self._lent += 1\n",
        "        self._lent += 0\n",
        needs="has_children",
    ),
)


def noticed(fault: Planted, most: int, seconds: float) -> str:
    """The number of histories after which the oracle complains, and what it says."""
    until = time.process_time() + seconds
    for seed in range(most):
        plan = draw(seed)
        if fault.met_by and not fault.met_by & {each.kind for each in plan.faults}:
            continue
        if fault.needs and not getattr(plan, fault.needs):
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
