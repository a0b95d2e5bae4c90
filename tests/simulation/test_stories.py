"""Every history that once failed, as small as it could be made, is run again; and stories that are told in words."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.simulation.history import History, Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault, of_text
from tests.simulation.server import Kind
from tests.simulation.told import NO_EVENTS, OWN_KEYS, REPLAY, TASKS, Told, call, played, replies, task

STORIES = sorted((Path(__file__).parent / "stories").glob("*.json"))
_ASKED, _DONE, _INVALID = "200 input_required", "200 complete", "400 invalid_request_state"

OWNERSHIP: Final = {
    "a former owner passes a later round to the replica that asked it": Told(
        (call(2, 1, 2, questions=2), Fault("part", 1.0, 6.0, target=2)),
        f"gw-2 {_ASKED}; gw-1 {_ASKED}; gw-2 {_DONE}",
    ),
    # Its client has left, and comes back through a replica that hears nothing of the owner, and so runs it again.
    **{
        f"a former owner whose grace has passed passes the call on, after {think} s": Told(
            (
                call(1, 1, 2, 1, think=think, habit="leaves", tool="search", questions=2, between=6.0),
                Fault("one way", 1.2, 8.0),
            ),
            f"gw-1 {_ASKED}; gw-2 {_ASKED}; gw-1 {_DONE}",
            {"kind": NO_EVENTS},
        )
        for think in (0.2, 4.0)
    },
    "an answer counts though its call is lost before the server has said that it has it": Told(
        (
            call(1, think=2.0, habit="one by one", tool="search", questions=2, **{"at once": True}),
            Fault("server", 2.2, 1.0),
        ),
        f"gw-1 {_ASKED}; gw-1 {_ASKED}; gw-1 {_DONE}",
        {"kind": Kind(has_events=False, answers_late=True)},
        runs=2,
    ),
    # It may be run again once its client, who thinks until then, comes back.
    **{
        f"a drain leaves a lost call to the next process if that can open its state: {end}": Told(
            (
                call(think=8.0, tool="search", questions=1),
                Fault("cold cut", 1.0, 0.0),
                Fault("term", 2.0, 6.0),
            ),
            f"gw-1 {_ASKED}; gw-1 {end}",
            {"replicas": 1, "kind": NO_EVENTS, **keys},
            runs=runs,
        )
        for keys, end, runs in ((OWN_KEYS, _INVALID, 1), ({}, _DONE, 2))
    },
    # The owner learns that its client left once it is reachable again, when the call has gone on elsewhere.
    "an owner does not cancel a call that another replica resumed when its client left": Told(
        (call(2, 2, 1, 1, 3, 3, habit="leaves", questions=2, between=6.0), Fault("part", 4.05, 6.0, target=2)),
        f"gw-2 {_ASKED}; gw-1 {_ASKED}; gw-3 {_DONE}",
    ),
    # What the owner sends does not arrive, so the client that left it is served by the replicas that miss it.
    "an owner that reaches no replica does not cancel a call that its client may continue there": Told(
        (call(2, 2, 1, 1, 3, 3, habit="leaves", questions=2, between=6.0), Fault("one way", 2.0, 6.0, target=2)),
        f"gw-2 {_ASKED}; gw-1 {_ASKED}; gw-3 {_DONE}",
    ),
    # The first replica is down when the client begins, so that it goes on with the newer one of its two states.
    **{
        f"a replica that only asks again for a silent owner leaves the call to it: {fault}": Told(
            (
                call(3, 2, 1, 1, 1, 3, 3, at=0.6, habit="asks again", questions=1),
                Fault("kill", 0.5, 0.6, target=3),
                Fault(fault, 3.0, 6.0, target=2),
            ),
            rf"gw-2 {_ASKED}; gw-1 {_ASKED}(; gw-\d 503 owner_stalled)+; gw-\d {_DONE}",
            {"kind": NO_EVENTS},
        )
        for fault in ("part", "stop")
    },
    # It leaves the owner, and comes back at once, through a replica that does not reach the owner.
    **{
        f"a client that obeys a 503 finds its call within the grace period, at {visited}": Told(
            (
                call(*visited, at=0.6, habit="leaves", questions=1, between=6.0),
                Fault("kill", 0.5, 0.6, target=3),
                Fault("peers", 2.0, 15.0, target=2, other=1),
            ),
            f".*; gw-1 503 owner_stalled; .*gw-3 {_DONE}",
            {"kind": NO_EVENTS},
        )
        for visited in ((3, 2, 2, 1, 3), (3, 2, 2, 1, 1, 3))
    },
    # The client comes back 4 s after it left the replica that had taken its call over.
    "a dead owner's call that was cancelled is not resumed once more": Told(
        (call(2, 3, 3, 3, 1, 1, habit="leaves", questions=1, between=9.0), Fault("kill", 2.0, 40.0, target=2)),
        f"gw-2 {_ASKED}; gw-3 {_INVALID}",
        {"grace_seconds": 1.5},
    ),
    # Its client leaves the first one while that works, comes back elsewhere, and answers the next round there.
    "the later of two runs of a call that nobody holds is continued": Told(
        (call(1, 1, 2, 1, 2, think=0.5, habit="leaves", questions=2, between=1.0),),
        rf"gw-1 {_ASKED}; gw-2 {_ASKED};.* gw-\d {_DONE}",
        REPLAY,
    ),
    # The server withdraws its question, so the call ends well, and its session would be idle.
    "a result that no client has come for outlives the drain of its replica": Told(
        (call(1, 2, think=6.0, questions=1, patience=1.5), Fault("term", 1.0, 60.0)),
        f"gw-1 {_ASKED}; gw-2 {_DONE}",
        {"drain_seconds": 2.0},
    ),
    # The owner stalls, and another replica takes its call over: the stream tells both of them of the URLs. The client
    # accepts what the other one asked, does not read the reply, and goes on. No session ends under the call.
    **{
        f"who asked for visits to urls is the one that sends the call again: its client {where}": Told(
            (
                call(
                    *(*visited, 1, 1, 1, last),
                    think=1.0,
                    habit="leaves unread",
                    questions=1,
                    urls="later",
                    logs=True,
                    between=60.0 if hold else 1.0,
                ),
                Fault("stop", 2.9, 6.0, target=3),
            ),
            ".*",
            hold,
            runs=2,
        )
        for where, visited, last, hold in (
            ("comes to the former owner", (3, 1), 1, {}),
            ("comes there later", (3, 1), 3, {}),
            ("comes there, and that does not hear of it", (3, 1), 1, {"ttl_seconds": 15.0}),
        )
    },
    "a silent replica that may have sent a call again after visits to urls keeps it": Told(
        (
            call(2, 2, 1, 1, think=1.0, habit="leaves for a moment", questions=1, urls=True, before=4.0),
            Fault("stop", 5.3, 3.0, target=2),
        ),
        f".*gw-1 503 owner_stalled; .*{_DONE}",
        runs=2,
    ),
    "a result that its client has not read outlives the drain of its replica": Told(
        (call(1, 1, 1, 2, think=1.0, habit="leaves unread", questions=1), Fault("term", 5.0, 60.0)),
        f".*{_DONE}",
        {"drain_delay_seconds": 0.5, "drain_seconds": 1.0},
    ),
    # Its replica is cut off when the run is to be cancelled, because its client was asked.
    "a cancellation of a run that no replica can resume is sent until it arrives": Told(
        (call(1, 2, questions=1), Fault("part", 0.5, 15.0)),
        f".*{_DONE}",
        {**REPLAY, "quiet_seconds": 2.0},
        runs=2,
    ),
}
STATES: Final = {
    # The second question comes just before its replica is cut off for 15 s, and is sealed just after that.
    **{
        f"a state ages on its way to its client, for {ttl} s": Told(
            (call(2, 2, 1, think=1.0, questions=2, between=0.93), Fault("part", 2.0, 15.0, target=2)),
            f"gw-2 {_ASKED}; gw-2 {_ASKED}; gw-1 {end}",
            {"ttl_seconds": ttl},
        )
        for ttl, end in ((10.0, _INVALID), (90.0, _DONE))
    },
    # It comes back after 0.8 s, to a replica that is cut off just then.
    **{
        f"a client that has left does not reach its replica within a grace period of {grace} s": Told(
            (
                call(think=1.0, habit="leaves for a moment", questions=1, between=12.0),
                Fault("part", 1.4, 8.0),
            ),
            f"gw-1 {_ASKED}; gw-1 {end}",
            {"replicas": 1, "grace_seconds": grace},
        )
        for grace, end in ((6.0, _INVALID), (20.0, _DONE))
    },
    # It comes back after 4 s, obeys a 503, and reaches the owner some milliseconds after 6 s.
    **{
        f"a client comes back through a replica that does not reach the owner, in a grace period of {grace} s": Told(
            (
                call(2, 1, 1, 1, think=1.0, habit="leaves", questions=1, between=12.0),
                *(Fault("peers", 4.0, 2.0, target=2, other=other) for other in (1, 3)),
            ),
            f"gw-2 {_ASKED}; gw-1 503 owner_stalled; gw-. {end}",
            {"kind": NO_EVENTS, "grace_seconds": grace},
        )
        for grace, end in ((6.0, _INVALID), (20.0, _DONE))
    },
    # The clock of the owner is ahead, from before the call until after its grace period.
    "a replica does not tell an owner whose state is of the future that its client is back": Told(
        (
            call(2, 2, 1, 1, 1, 1, 2, at=1.0, think=0.01, habit="leaves", questions=2, between=9.0),
            Fault("jump", 0.0, 15.0, target=2, amount=90.0),
        ),
        f"gw-2 {_ASKED}(; gw-1 503 owner_stalled){{4}}; gw-2 {_INVALID}",
        {"kind": NO_EVENTS, "ttl_seconds": 120.0},
    ),
    # Silence is looked for every 10 s: at 20 s, the client has just answered questions that it had for longer.
    "a server is not silent for as long as the client took to answer": Told(
        (call(1, think=18.5, questions=1, hangs=4.0),),
        f"gw-1 {_ASKED}; gw-1 {_DONE}",
        {"replicas": 1, "ttl_seconds": 60.0, "timeouts": {"idle_seconds": 10}, "legs": {"limit_seconds": 50}},
    ),
    # A clock that was ahead by 400 s keeps its replica from being asked for as long, although it was set right again.
    "an owner asks about an expired call until the replica whose clock was set back can be asked": Told(
        (
            call(2, 2, 3, 1, think=8.0, questions=1),
            Fault("jump", 7.0, 15.0, target=2, amount=90.0),
            Fault("jump", 15.5, 15.0, target=3, amount=400.0),
        ),
        f"gw-2 {_ASKED}; gw-2 {_INVALID}",
        {"ttl_seconds": 10.0},
    ),
    # The replica that got the copy stands still while another one serves the request, and parks the call again.
    **{
        f"a copy of a request is refused only if its call went cold meanwhile, after {cold} s": Told(
            (call(1, 2, 1, 1, 1, think=1.0, habit="twice", questions=2), Fault("stop", 0.5, 6.0, target=2)),
            rf"gw-1 {_ASKED}; gw-1 {_ASKED}; gw-2 {reply}; .*{_DONE}",
            {"replicas": 2, "cold_seconds": cold},
        )
        for cold, reply in ((2.0, _INVALID), (0.0, _ASKED))
    },
    # The owner hears the request of another replica, and then nothing that it says arrives for 2 s.
    **{
        f"a repeat of a request whose reply was lost is refused only if its call went cold, after {cold} s": Told(
            (call(2, 1, 1, think=0.01, questions=2, between=0.05), Fault("one way", 0.1, 2.0, target=2)),
            f"gw-2 {_ASKED}; gw-1 503 owner_stalled; .*{end}",
            {"cold_seconds": cold},
        )
        for cold, end in ((2.0, _INVALID), (0.0, _DONE))
    },
    # It reads late, and the replica that relays the owner's reply dies meanwhile.
    **{
        f"a client had not read the questions when its connection broke, and its call went cold after {cold} s": Told(
            (
                call(1, 2, 2, 2, 2, 2, think=0.2, habit="reads late", tool="search", questions=2, between=0.05),
                Fault("kill", 1.5, 6.0, target=2),
            ),
            f".*{end}",
            {"cold_seconds": cold},
        )
        for cold, end in ((2.0, _INVALID), (0.0, _DONE))
    },
    # It does not reach the owner, which asked 8 s before; its client comes back to the owner after 12 s more.
    **{
        f"a replica that only asks again gives its client no more time than {ttl} s": Told(
            (
                call(2, 1, 2, think=8.0, habit="asks again, thinks", questions=1),
                *(Fault("peers", 4.0, 6.0, target=2, other=other) for other in (1, 3)),
            ),
            f"gw-2 {_ASKED}; gw-1 {_ASKED}; gw-2 {end}",
            {"ttl_seconds": ttl},
        )
        for ttl, end in ((20.0, _INVALID), (90.0, _DONE))
    },
    # It stands still when the request comes, and is cut off when it goes on and asks.
    **{
        f"a state of a modern server reaches a replica that cannot ask for {seconds} s what the server is": Told(
            (
                call(1, 2, think=8.0, tool="search", path="/modern", questions=1),
                Fault("stop", 7.5, 6.0, 2),
                Fault("part", 10.5, seconds, 2),
            ),
            f"gw-1 {_ASKED}; gw-2 200 {end}",
            {"replicas": 2},
        )
        for seconds, end in ((6.0, "complete"), (12.0, "upstream_unreachable"))
    },
    # It comes back after 0.8 s, and is not read for 8 s.
    "a client may come back while its replica stands still beyond the grace period": Told(
        (
            call(think=1.0, habit="leaves for a moment", questions=1, between=12.0),
            Fault("stop", 0.1, 8.0, when="detached"),
        ),
        f"gw-1 {_ASKED}; gw-1 {_DONE}",
        {"replicas": 1, "grace_seconds": 1.0},
    ),
    # Its leg waits at the third replica, which gives it up. Then it asks the second one, which is cut off.
    "a client loses the grace period at a replica that it does not reach": Told(
        (
            call(1, 3, 2, 3, think=0.2, questions=2, between=6.0),
            Fault("part", 0.0, 15.0, target=2),
            Fault("one way", 0.3, 2.0),
        ),
        f"gw-1 {_ASKED}; gw-3 503 owner_stalled; gw-3 {_INVALID}",
        {"kind": NO_EVENTS},
    ),
    # The owner hears that the replica at which its leg waits gives it up, and nobody hears the owner.
    "a client loses the grace period where no link leads to the owner": Told(
        (call(1, 3, 3, 3, 3, 3, think=0.2, questions=2, between=9.0), Fault("one way", 0.3, 7.0)),
        f"gw-1 {_ASKED}(; gw-3 503 owner_stalled){{4}}; gw-3 {_INVALID}",
        {"kind": NO_EVENTS},
    ),
    # A request of its client arrives late, and is given up at once; then no link leads to the owner again.
    **{
        f"an owner that hears of the end of a leg gives up its client: {kind}": Told(
            (
                call(1, *[3] * 7, think=0.2, questions=2, hangs=20.0),
                Fault("one way", 0.45, 0.7, target=3),
                Fault(kind, 2.1, 6.0, target=1, other=3),
            ),
            f".*gw-3 {_INVALID}",
            {"kind": NO_EVENTS},
        )
        for kind in ("peers", "part")
    },
    "a drain leaves a call to another replica if its client waits and gets a new state": Told(
        (
            call(1, 2, at=0.01, questions=1, aside=True, between=6.0),
            Fault("slow", 0.0, 3.0),
            Fault("term", 2.0, 2.0),
        ),
        f"gw-1 {_ASKED}; gw-2 {_ASKED}; gw-2 {_DONE}",
    ),
    # Its state does not say where to read on, and leads nowhere once its replica has ended in a drain.
    "a question comes before the first event id of its call": Told(
        (
            call(1, 2, at=0.01, think=8.0, questions=1, aside=True),
            Fault("slow", 0.0, 3.0),
            Fault("term", 2.0, 2.0),
        ),
        f"gw-1 {_ASKED}; gw-2 200 owner_lost",
    ),
    # The server takes 0.3 s for that, and the replica waits for 10 s.
    **{
        f"an answer is accepted while its replica stands still: {kind}": Told(
            (call(think=1.0, questions=1, between=20.0), Fault(kind, 1.2, 12.0)),
            f"gw-1 {_ASKED}; gw-1 {_DONE}",
            {"replicas": 1, "kind": Kind(answers_late=True)},
        )
        for kind in ("stop", "stall")
    },
}
OF_TASKS: Final = {
    "a task is served by any replica": Told(
        (task(questions=2, before=1.0, between=1.0),),
        "working; input_required; working; input_required; working; completed",
    ),
    "a result that the server forgets to send is asked for again": Told(
        (task(questions=1, before=6.0, forgets=True),), "working; input_required; working; completed"
    ),
    "a task that fails says why": Told((task(questions=1, fails=True),), ".*; failed"),
    **{
        f"an answer that the server refuses is asked for again: {how}": Told(
            (task(questions=2, refuses=how),), ".*; completed"
        )
        for how in ("503", "cut")
    },
    # The server waits for a shorter time than the user thinks.
    "an answer that comes after the end of its task changes nothing": Told(
        (task(questions=1, patience=1.0),), "input_required; completed"
    ),
    **{
        f"a client that has left when its task is made gets it when it comes back: {statuses}": Told(
            (task(habit="leaves", questions=1, made=2.7, asks_first=True, between=between),), statuses
        )
        for between, statuses in ((0.0, "completed"), (6.0, "working; completed"))
    },
    "a task that its client cancels at another replica is cancelled": Told(
        (task(habit="cancels", before=15.0),), "cancelled"
    ),
    # It works, then its question is open, then it works again.
    **{
        f"a task outlives the replica that follows it: {fault} after {at} s": Told(
            (task(1, 2, 3, 2, 3, 2, questions=1, before=1.0, between=8.0), Fault(fault, at, 6.0)), ".*completed"
        )
        for fault in ("kill", "power", "term", "int", "stop", "part")
        for at in (0.5, 2.0, 4.0)
    },
    "a task fails with its server": Told((task(before=15.0), Fault("server", 3.0, 2.0)), "working; failed"),
    # Its client asks all of them in turn, so that a question which two had heard would be open again at one.
    **{
        f"a replica that was restarted leaves its tasks to the one that follows them: gw-{target}": Told(
            (
                task(*(target, target, target % 3 + 1), *(1, 2, 3) * 4, questions=1, before=3.0, between=8.0),
                Fault("kill", 0.6, 1.0, target=target),
            ),
            "working; input_required; working; completed",
        )
        for target in (1, 2, 3)
    },
    # By then its client may have been asked, or be away after a round that sheds load.
    **{
        f"a task that is made late is given all the same: after {made} s, {'asks' if asks_first else 'silent'}": Told(
            (task(questions=1, made=made, asks_first=asks_first),), ".*completed"
        )
        for made in (0.02, 2.0, 6.0)
        for asks_first in (True, False)
    },
    "a replica that drains while a task is made leaves it to another one": Told(
        (task(questions=1, made=4.0, asks_first=False), Fault("term", 2.0, 6.0)), ".*completed"
    ),
    # The result of the task is asked for again, and comes.
    "the session of a task ends though a stream broke in it": Told(
        (task(1, questions=0, before=4.0), Fault("cold cut", 2.0, 0.0)),
        ".*completed",
        {"replicas": 1, "kind": Kind(has_events=False, has_lasting_tasks=True)},
    ),
}
REMAINS: Final = {
    # The task is called again after the visit, in another session than the one that was reserved for it.
    "a session that is lost while urls are visited gives its room back": Told(
        (call(think=2.0, tool="job", questions=1, urls="first"), Fault("server", 1.0, 0.5)),
        f".*{_DONE}",
        {"replicas": 1, "kind": Kind(has_events=False, has_tasks=True)},
    ),
    # The server withdraws its question, so the result comes while no client waits.
    "the session of a task ends once a client that was away has its result": Told(
        (call(think=6.0, tool="job", questions=1, patience=2.0),),
        f".*{_DONE}",
        {"replicas": 2, "kind": Kind(has_tasks=True)},
    ),
    # The client leaves, and its tool does not hear of that: the session is quarantined for a minute.
    "a call that ends late in its history is given the time that its session is kept": Told(
        (call(at=260.0, habit="goes", questions=0, before=90.0, deaf=True),), "", {"replicas": 1}
    ),
    # No answer arrives before its server withdraws the question, so each run gets one more from the record.
    "a tool that hangs in several runs is waited for": Told(
        (
            call(
                think=4.0,
                tool="search",
                questions=3,
                hangs=70.0,
                between=0.2,
                refuses="late cut",
                patience=1.5,
            ),
        ),
        f".*{_DONE}",
        {"replicas": 1, "legs": {"limit_seconds": 1.0}},
        runs=4,
    ),
    # The time of the state is over while the replica is cut off.
    "a cancellation that does not reach the server is sent again": Told(
        (call(think=1.0, habit="abandons", questions=1), Fault("part", 9.0, 15.0)),
        f"gw-1 {_ASKED}",
        {"replicas": 1, "kind": NO_EVENTS, "ttl_seconds": 10.0},
    ),
}
TOLD: Final = (
    OWNERSHIP | STATES | {name: told._replace(how={**TASKS, **told.how}) for name, told in OF_TASKS.items()} | REMAINS
)


def story(name: str) -> Outcome:
    """What becomes of a history that is told, or is in a file of `stories/`."""
    if name in TOLD:
        return played(*TOLD[name].parts, **TOLD[name].how)
    return History(of_text((Path(__file__).parent / "stories" / f"{name}.json").read_text())).run()


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_that_once_went_wrong_goes_well(path: Path) -> None:
    assert complaints(story(path.stem)) == []


@pytest.mark.parametrize("name", TOLD)
def test_a_story_goes_as_it_is_told(name: str) -> None:
    outcome, told = story(name), TOLD[name]
    said = "; ".join(replies(outcome))
    assert re.fullmatch(told.replies, said), said
    # What two replicas have shared, neither of them may end.
    assert complaints(outcome) == []
    assert told.runs in (None, len(outcome.ledger.runs))
