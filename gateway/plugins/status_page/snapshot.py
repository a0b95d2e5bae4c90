"""Takes a snapshot of a process for /status, when someone looks; nothing is recorded or asked beforehand."""

import os
import resource
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import nlargest
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gateway import __version__, world
from gateway.admin.process_parts import ProcessParts
from gateway.bridge.call_context import client_shown, shown_name
from gateway.cluster.membership import UNSEEN, Membership
from gateway.config import cautions, digest, reload_command
from gateway.downstream.legs import Seen
from gateway.http.incoming import Incoming, client_address
from gateway.plugins.status_page.merge_statuses import cut, failing_first, key_phase
from gateway.plugins.status_page.status_view import near, sessions_near_limit, waits_for
from gateway.routes.live_route import LiveRoute
from gateway.seal.keyring import key_id
from gateway.telemetry import Metrics, SessionLimit, SessionState
from gateway.telemetry.process_status import (
    LONG_SECONDS,
    MOST_CALLERS,
    MOST_CLIENTS,
    MOST_HELD,
    CallerStatus,
    CallStatus,
    KeyStatus,
    PeerStatus,
    ProcessStatus,
    RouteStatus,
    Status,
    StatusNotice,
    Use,
    health,
)
from gateway.telemetry.recent_errors import presentable

_PAGE_BYTES: Final = resource.getpagesize()
_REJECTIONS: Final = 5
"""Problems of a rejected file that are shown; the log has them all."""


def take_snapshot(source: ProcessParts) -> Status:
    """Return the status of one process."""
    calls, now = dict.fromkeys((*source.downstream.legs.seen, *source.lot.waiting())), world.monotonic()
    running = _running(calls, now)
    passing = [*takewhile(lambda each: now - each[1] >= LONG_SECONDS, source.routes.process.passing.items())]
    lost = (driver for driver in source.lot if driver.is_lost)
    held = Counter(driver.live.route.path for driver in source.lot.waiting())
    tasks = Counter(task.live.route.path for task in source.task_table)
    ages = defaultdict[str, list[float | None]](list)
    for call, seconds in running.items():
        ages[call.live.route.path].append(None if call.heard is None else seconds)
    for incoming, began in passing:
        ages[incoming.path].append(now - began)
    routes = [
        _route(live, held[path], tasks[path], ages[path], source.metrics) for path, live in source.routes.live.items()
    ]
    peers = tuple(known_peers(source.members))
    own, state = _process(source, calls), source.config.state
    status = Status(
        version=__version__,
        replica=own.id,
        state=own.state,
        time=datetime.fromtimestamp(world.wall(), UTC).isoformat(timespec="seconds"),
        uptime_seconds=own.uptime_seconds,
        configuration=own.configuration,
        # The sessions of one process: a sum would hide it.
        notices=(*_notices(source), *sessions_near_limit(routes), *_callers_near_limit(source)),
        processes=(own,),
        routes=tuple(failing_first(routes)),
        routes_total=len(routes),
        # Those that were parked first, then those whose clients have still to be told.
        held=_shown(islice(chain(source.lot.waiting(), lost), MOST_HELD)),
        held_total=own.held,
        running=(*_shown(islice(running, MOST_HELD)), *_passing(source, now, passing[:MOST_HELD])),
        running_total=len(running) + len(passing),
        callers=tuple(_callers(source, calls)),
        addresses=dict(Counter(call.asked.remote or "-" for call in calls).most_common(MOST_CLIENTS)),
        peers=peers,
        peers_total=len(peers),
        keys=tuple(
            KeyStatus(key_id(key), "only opens" if place else "seals and opens")
            # The configured ones, or the one that replaces them where none is configured.
            for place, key in enumerate(source.keys.value.present[: len(state.keys) or 1])
        ),
        keys_kept_seconds=max(state.ttl_seconds, source.config.tasks.ttl_seconds) if state.keys else 0.0,
        errors=source.recent_errors.told(),
    )
    return cut(replace(status, key_phase=key_phase({own.id: status}, status.processes)))


def _callers(source: ProcessParts, held_or_running: Iterable[Seen]) -> Iterator[CallerStatus]:
    """Yield the callers that have the most calls or sessions in use."""
    lots = [source.lot.per_principal, source.downstream.legacy.mirrored.lot.per_principal]
    held, sessions = Counter(lots[0]) + Counter(lots[1]), Counter[bytes]()
    for _, principal, count in source.sessions_in_use():
        sessions[principal] += count
    most = nlargest(MOST_CALLERS, {**held, **sessions}, key=lambda it: max(held[it], sessions[it]))
    calls = {principal: Counter[tuple[str | None, bytes]]() for principal in most}
    own, most_held = source.members.own, source.config.hold.max_calls_per_principal
    nearest = dict.fromkeys(most, Use())
    for live, principal, count in source.sessions_in_use():
        if principal in nearest:
            use = Use(count, live.config.sessions.max_per_principal, f"{live.route.path} of {own}")
            nearest[principal] = max(nearest[principal], use, key=Use.part)
    for call in held_or_running:
        asked = call.asked
        if asked.key.principal in calls:
            calls[asked.key.principal][asked.remote, asked.key.client_info] += 1
    for principal in most:
        tag, clients = source.routes.process.tags.of(principal), Counter[str]()
        for client, count in calls[principal].most_common(MOST_CLIENTS):
            clients[client_shown(*client)] += count
        yield CallerStatus(
            caller=tag,
            held=held[principal],
            sessions=sessions[principal],
            most_held=Use(max(lot.get(principal, 0) for lot in lots), most_held, own),
            most_sessions=nearest[principal],
            clients=dict(clients),
        )


def _callers_near_limit(source: ProcessParts) -> Iterator[StatusNotice]:
    tags, (count, principal) = source.routes.process.tags, source.fullest_holder
    most = source.config.hold.max_calls_per_principal
    yield from near(f"Held calls of caller {tags.of(principal)}", count, most, "hold.max_calls_per_principal")
    (count, principal), most = source.calls.fullest_caller, source.config.limits.share_of_calls_bytes
    yield from near(f"Bytes of calls of caller {tags.of(principal)}", count, most, "limits.calls_bytes_per_principal")
    for path, (count, principal) in source.fullest_callers().items():
        label = f"Sessions in use of caller {tags.of(principal)} on {path}"
        most = source.routes.live[path].config.sessions.max_per_principal
        yield from near(label, count, most, SessionLimit.OF_CALLER)


def _running(calls: Iterable[Seen], now: float) -> dict[Seen, float]:
    """Return the calls that have run for long with their seconds, the longest first; some may wait without a leg."""
    running = ((call, call.running_seconds(now)) for call in calls)
    found = ((call, seconds) for call, seconds in running if seconds is not None and seconds >= LONG_SECONDS)
    return dict(sorted(found, key=lambda each: -each[1]))


def _passing(source: ProcessParts, now: float, shown: Iterable[tuple[Incoming, float]]) -> Iterator[CallStatus]:
    """Yield those of the requests that pass through which are shown: each may have a large body to be read."""
    process, proxies = source.routes.process, source.config.principal.trusted_proxies
    for incoming, began in shown:
        incoming.note()
        caller, method = incoming.caller, incoming.rpc_method or incoming.method
        yield CallStatus(
            route=incoming.path,
            method=presentable(method[:80]),
            name=shown_name(method, incoming.target or ""),
            state="passed through",
            age_seconds=now - began,
            running_seconds=now - began,
            waits_for="the server's response, passed through",
            request_id=incoming.request_id,
            at_end="lost",
            owner=source.members.own,
            caller=process.tags.of(caller.principal) if caller is not None else "",
            client=client_shown(client_address(incoming.remote, incoming.headers, proxies), b"{}"),
        )


def _shown(calls: Iterable[Seen]) -> tuple[CallStatus, ...]:
    now = world.monotonic()
    return tuple(replace(seen := call.glance(now), waits_for=waits_for(seen)) for call in calls)


def _route(live: LiveRoute, held: int, tasks: int, ages: Sequence[float | None], metrics: Metrics) -> RouteStatus:
    route, pool = live.route, live.upstream.pool
    last_ok, failure = live.upstream.last_ok_seconds_ago, live.upstream.health.failure
    by_command = route.upstream.command is not None
    is_modern = live.upstream.is_modern if route.era != "bridge" else False
    return RouteStatus(
        path=route.path,
        upstream=route.upstream.name,
        # A modern server needs no handshake, which would tell: it answers over streamable HTTP.
        transport=live.upstream.transport or ("auto" if last_ok is None else "streamable-http"),
        era="unknown" if is_modern is None else "modern" if is_modern else "old",
        continuation=route.continuation,
        health=health(last_ok, failure),
        last_ok_seconds_ago=last_ok,
        last_failure=failure,
        held=held,
        sessions={state.value: int(metrics.sessions[route.path, state].value) for state in SessionState},
        sessions_limit=pool.most,
        waiting=pool.waiting,
        children=int(metrics.children[route.path,].value) if by_command else None,
        children_limit=route.upstream.max_children if by_command else None,
        subscriptions=len(live.upstream.subscriptions),
        mirrored=int(metrics.mirrored_calls[route.path,].value),
        client_sessions=int(metrics.client_sessions[route.path,].value),
        tasks=tasks,
        oldest_call_seconds=max((age for age in ages if age is not None), default=None),
        running=len(ages),
        unsent=ages.count(None),
        streams=len(live.upstream.streams),
    )


def _process(source: ProcessParts, calls: Iterable[Seen]) -> ProcessStatus:
    config, lot, deadline = source.config, source.lot, source.routes.process.draining.deadline
    most = world.most_descriptors()
    return ProcessStatus(
        id=source.members.own,
        state="ready" if source.reload.is_open else "draining",
        configuration=digest(config),
        loaded_seconds_ago=max(world.wall() - source.metrics.load_time[()].value, 0.0),
        sealing_seconds_ago=world.monotonic() - source.keys.value.sealing_since,
        newest_key=source.keys.value.newest,
        pid=os.getpid(),
        uptime_seconds=world.monotonic() - source.began,
        in_flight=source.downstream.in_flight,
        held=len(lot),
        held_limit=config.hold.max_calls,
        lost_at_end=source.lost_at_end(calls),
        ends_in_seconds=None if deadline is None else max(deadline - world.monotonic(), 0.0),
        cold=len(lot.cold),
        connections=len(source.client_listener.connections),
        connections_limit=config.limits.connections,
        open_files=sum(1 for _ in world.OPEN_DESCRIPTORS.iterdir()),
        open_files_limit=max(most - world.kept_descriptors(most), 0),  # RLIM_INFINITY is -1
        budgets=source.metrics.budgets(),
        memory_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,  # resident (proc(5))
    )


def known_peers(members: Membership) -> Iterator[PeerStatus]:
    """Yield the other hosts and their last known state; this sends nothing to them."""
    moment = world.monotonic()
    for name, address in members.others().items():
        if not members.is_own_host(name):  # workers are among the processes of the status
            seen = members.seen.get(name, UNSEEN)
            ago, last = (None if at is None else moment - at for at in (seen.at, seen.answered))
            told = {"found_seconds_ago": ago, "last_answer_seconds_ago": last}
            yield PeerStatus(id=name, address=address, state=seen.state, **told)


def _notices(source: ProcessParts) -> Iterator[StatusNotice]:
    if bugs := source.tasks.failures:
        yield StatusNotice(
            f"{bugs} unexpected errors inside the gateway since its start",
            "Each is a bug: please report it with the traceback in the log (`task.failed`)",
        )
    if (rejected := source.reload.rejected) is not None:
        more = f"; and {len(rejected) - _REJECTIONS} more" if len(rejected) > _REJECTIONS else ""
        text = "; ".join(presentable(problem) for problem in rejected[:_REJECTIONS])
        fix = f"Correct the file (`mrtr-gateway check --config {source.recent_errors.config_file}`), then"
        if source.reload.needs_restart:
            fix = "Restart the gateway, or put the old values back in the file and"
        yield StatusNotice(
            f"The configuration file was rejected, and the previous configuration stays in use: {text}{more}",
            f"{fix} run `{reload_command(source.config)}`",
        )
    for sentence in cautions(source.config, source.certificates.value, is_served=True):
        yield StatusNotice(sentence, is_bad=False)
