"""The status as a page: one document, no script, nothing fetched, every text escaped; pure.

Source: https://www.w3.org/TR/CSP3/. The style sheet is let in by its hash, and nothing else is: should a text ever get
out of its place, a browser would neither run it nor send anything anywhere.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Final, NamedTuple
from urllib.parse import quote

from gateway.net.markup import Html, join, tag, text
from gateway.net.status import (
    MOST_ERRORS,
    ErrorStatus,
    HeldStatus,
    KeyStatus,
    Notice,
    PeerStatus,
    ProcessStatus,
    RouteStatus,
    Status,
)

_STYLE: Final = resources.files("gateway.net").joinpath("status.css").read_text(encoding="utf-8")
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of the page and of its JSON."""

_SECONDS: Final = re.compile(r"[0-9]{1,4}")
_LEAST_SECONDS: Final = 2
_USUAL_SECONDS: Final = 10
_NEAR: Final = 0.8
"""The part of a limit from which on it is worth a look."""
_FULL: Final = 0.95
_ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="{}"/></svg>'
)
_COLOURS: Final = {"good": "#1f8a4c", "warn": "#b86e00", "bad": "#c4261d"}
_HEALTH: Final = {"ok": ("good", "ok"), "failing": ("bad", "failing"), "unknown": ("idle", "not asked yet")}
_PEERS: Final = {"answered": "good", "dead": "bad", "silent": "warn", "stalled": "warn", "not asked": "idle"}
_PROCESSES: Final = {"ready": "good", "draining": "warn", "silent": "bad"}
_UNITS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def every_seconds(asked: str | None) -> int | None:
    """Return how often the page shall be loaded again, in seconds, from `?refresh=`; None for never."""
    if asked is None or not _SECONDS.fullmatch(asked):
        return None
    return max(int(asked), _LEAST_SECONDS)


def prefers_json(accept: str) -> bool:
    """Whether an Accept header names JSON, and no HTML."""
    return "application/json" in accept and "text/html" not in accept


def page(status: Status, refresh_seconds: int | None = None) -> str:
    """Return the whole document."""
    notices = [*_faults(status), *status.notices]
    level = "bad" if any(notice.is_bad for notice in notices) else "good" if status.state == "ready" else "warn"
    icon = f"data:image/svg+xml,{quote(_ICON.format(_COLOURS[level]))}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="refresh", content=str(refresh_seconds)) if refresh_seconds is not None else "",
        tag("title", f"{status.replica}: {_verdict(status, notices)} - mrtr-gateway"),
        tag("link", rel="icon", href=icon),
        tag("style", Html(_STYLE)),
    )
    main = tag(
        "main",
        _figures(status),
        _attention(notices),
        _routes(status),
        _held(status),
        _errors(status.errors),
        _processes(status),
        _peers(status),
        _keys(status),
    )
    body = tag("body", _header(status, notices, level), main, _footer(refresh_seconds))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


# The sections.


def _header(status: Status, notices: Sequence[Notice], level: str) -> Html:
    facts = (
        f"up {duration(status.uptime_seconds)}",
        join("configuration ", tag("code", status.configuration)),
        join("as of ", tag("time", status.time.replace("T", " ").replace("+00:00", " UTC"), datetime=status.time)),
    )
    line = join(*(part for fact in facts for part in (" · ", fact)))
    return tag(
        "header",
        tag("h1", status.replica, _badge(level, _verdict(status, notices))),
        tag("p", f"mrtr-gateway {status.version}", line, class_="soft"),
    )


def _verdict(status: Status, notices: Sequence[Notice]) -> str:
    bad = sum(notice.is_bad for notice in notices)
    return f"{status.state}, {_counted(bad, 'thing')} to look at" if bad else status.state


def _faults(status: Status) -> list[Notice]:
    """What the tables below say that must not be overlooked."""
    found = []
    for route in status.routes:
        if route.health == "failing" and (failure := route.last_failure) is not None:
            since = (
                "" if route.last_ok_seconds_ago is None else f", its last answer came {ago(route.last_ok_seconds_ago)}"
            )
            found.append(Notice(f"The upstream of {route.path} is failing{since}", failure.fix, failure.cause))
    for label, used, limit, key in _limits(status):
        if limit and used >= _NEAR * limit:
            found.append(Notice(f"{label}: {used:,} of {limit:,} ({key})", "At the limit new ones are refused"))
    return found


def _limits(status: Status) -> list[tuple[str, int, int, str]]:
    """What is used of what there may be: where, how much, at most, and the limit's name."""
    found = []
    for process in status.processes:
        where = f" in {process.id}" if len(status.processes) > 1 else ""
        found += [
            (f"Held calls{where}", process.held, process.held_limit, "hold.max_calls"),
            (
                f"Held calls of one caller{where}",
                process.held_of_one_caller,
                process.held_of_one_caller_limit,
                "hold.max_calls_per_principal",
            ),
            (f"Connections{where}", process.connections, process.connections_limit, "limits.connections"),
            (f"Open files{where}", process.open_files, process.open_files_limit, "ulimit -n"),
        ]
    for route in status.routes:
        used = sum(route.sessions.values())
        name = "sessions.max" if route.children is None else "upstream.max_children"
        # Idle sessions make room, so a pool is full when none of it is idle.
        found.append(
            (f"Sessions in use of {route.path}", used - route.sessions.get("idle", 0), route.sessions_limit, name)
        )
    return found


def _figures(status: Status) -> Html:
    processes = status.processes
    failing = sum(route.health == "failing" for route in status.routes)
    errors = sum(error.count for error in status.errors)
    boxes = [
        _figure("Held calls", status.held_total, sum(each.held_limit for each in processes)),
        _figure("In flight", sum(each.in_flight for each in processes), of="requests"),
        _figure(
            "Connections",
            sum(each.connections for each in processes),
            sum(each.connections_limit for each in processes),
        ),
        _figure(
            "Open files", sum(each.open_files for each in processes), sum(each.open_files_limit for each in processes)
        ),
        _figure("Upstreams failing", failing, of=f"of {status.routes_total:,}", is_bad=failing > 0),
        _figure("Errors", errors, of="listed below" if errors else "since the start"),
    ]
    return tag("dl", *boxes, class_="facts")


def _figure(label: str, number: int, limit: int = 0, of: str = "", *, is_bad: bool = False) -> Html:
    """One number; with a limit, and a bar for how much of it is used."""
    said = tag("span", of or f"of {limit:,}", class_="soft")
    bar = _bar(number / limit) if limit else ""
    strong = tag("strong", f"{number:,}", class_="alarm" if is_bad else None)
    return tag("div", tag("dt", label), tag("dd", strong, " ", said, bar))


def _bar(part: float) -> Html:
    level = "full" if part >= _FULL else "near" if part >= _NEAR else None
    rect = tag("rect", width=f"{min(part, 1) * 100:.1f}", height="4")
    return tag("svg", rect, class_=level, viewBox="0 0 100 4", preserveAspectRatio="none", aria_hidden="true")


def _attention(notices: Sequence[Notice]) -> str:
    if not notices:
        return ""
    items = [
        tag(
            "li",
            tag("strong", _words(notice.text)),
            tag("p", _words(notice.detail)) if notice.detail else "",
            tag("p", _words(notice.fix), class_="soft") if notice.fix else "",
            class_="bad" if notice.is_bad else "warn",
        )
        for notice in sorted(notices, key=lambda notice: not notice.is_bad)
    ]
    return _section("attention", "To look at", tag("ul", *items, class_="notices"))


def _routes(status: Status) -> Html:
    caption = "Upstreams as their traffic shows them, those that fail first; this page asks them nothing."
    heads = ("Route", "Upstream", "Health", "Sessions", "Held", "Streams")
    return _section(
        "routes",
        "Routes",
        _table(f"{caption}{_rest(len(status.routes), status.routes_total)}", heads, map(_route, status.routes)),
    )


def _route(route: RouteStatus) -> "Row":
    level, word = _HEALTH[route.health]
    era = {"unknown": "era not known yet", "old": "old era", "modern": "modern, passed through"}[route.era]
    mode = f", continuation: {route.continuation}" if route.continuation != "hold" else ""
    failure = route.last_failure
    health: list[str] = [_badge(level, word)]
    if route.last_ok_seconds_ago is not None:
        health.append(f" last ok {ago(route.last_ok_seconds_ago)}")
    if failure is not None:
        # Of one that fails the cause stands above, with its fix.
        cause = "" if route.health == "failing" else join(": ", _words(failure.cause))
        health.append(tag("p", f"Last failure {ago(failure.seconds_ago)}", cause, class_="soft"))
    parts = [f"{count:,} {state}" for state, count in route.sessions.items() if count]
    if route.waiting:
        parts.append(f"{_counted(route.waiting, 'call')} waiting for one")
    if route.children is not None:
        parts.append(f"{_counted(route.children, 'child process', 'child processes')} of {route.children_limit:,}")
    sessions = tag("span", f"{sum(route.sessions.values()):,} of {route.sessions_limit:,}", class_="num")
    streams = [f"{count:,} {what}" for count, what in _streams(route) if count]
    return [
        _cell(tag("code", route.path)),
        _cell(tag("code", route.upstream), tag("p", f"{route.transport}, {era}{mode}", class_="soft"), class_="long"),
        _cell(*health, class_="wide"),
        _cell(sessions, tag("p", ", ".join(parts), class_="soft") if parts else ""),
        _cell(f"{route.held:,}", class_="num"),
        _cell(", ".join(streams) or "none"),
    ]


def _streams(route: RouteStatus) -> tuple[tuple[int, str], ...]:
    return (route.subscriptions, "bridged"), (route.streams, "passed through")


def _held(status: Status) -> Html:
    if not status.held:
        return _section("held", "Held calls", tag("p", "No call waits for its client.", class_="soft"))
    heads = ("Call", "Route", "Waits for", "Round", "Age", "Expires in", "Owner", "Caller")
    caption = "Oldest first, without contents. A caller's mark means nothing outside this page."
    rest = _rest(len(status.held), status.held_total)
    return _section("held", "Held calls", _table(f"{caption}{rest}", heads, map(_held_call, status.held)))


def _held_call(call: HeldStatus) -> "Row":
    waits = ", ".join(call.asked) if call.asked else "the client's next request"
    expires = "running" if call.expires_in_seconds is None else duration(call.expires_in_seconds)
    return [
        _cell(tag("code", call.method), tag("p", tag("code", call.name)) if call.name else ""),
        _cell(tag("code", call.route)),
        _cell(waits if call.state != "broken" else f"{waits}; its call is lost and will be run again"),
        _cell(str(call.round), class_="num"),
        _cell(duration(call.age_seconds), class_="num"),
        _cell(expires, class_="num"),
        _cell(tag("code", call.owner)),
        _cell(tag("code", call.caller)),
    ]


def _errors(errors: Sequence[ErrorStatus]) -> Html:
    if not errors:
        return _section("errors", "Last errors", tag("p", "None since the start.", class_="soft"))
    caption = f"Newest first, each kind once; the last {MOST_ERRORS} kinds are kept, the log has them all."
    return _section(
        "errors", "Last errors", _table(caption, ("Error", "Times", "Last", "First", "Route"), map(_error, errors))
    )


def _error(error: ErrorStatus) -> "Row":
    return [
        _cell(
            tag("code", error.kind),
            tag("p", _words(error.text)),
            tag("p", _words(error.fix), class_="soft") if error.fix else "",
            class_="wide",
        ),
        _cell(f"{error.count:,}", class_="num"),
        _cell(ago(error.last_seconds_ago), class_="num"),
        _cell(ago(error.first_seconds_ago), class_="num"),
        _cell(tag("code", error.route) if error.route else ""),
    ]


def _processes(status: Status) -> Html:
    several = len(status.processes) > 1
    heads = ("Process", "State", "Up", "Held", "Connections", "Open files", "Memory", "Configuration")
    caption = (
        "The workers of this host: replicas of one another." if several else "What this process uses of its limits."
    )
    return _section(
        "processes", "Workers" if several else "Process", _table(caption, heads, map(_process, status.processes))
    )


def _process(process: ProcessStatus) -> "Row":
    state = _badge(_PROCESSES[process.state], process.state)
    name = _cell(tag("code", process.id), tag("p", f"pid {process.pid}", class_="soft") if process.pid else "")
    if process.state == "silent":
        return [name, _cell(state), *[_cell("")] * 6]
    return [
        name,
        _cell(state),
        _cell(duration(process.uptime_seconds), class_="num"),
        _used(process.held, process.held_limit),
        _used(process.connections, process.connections_limit),
        _used(process.open_files, process.open_files_limit),
        _cell(f"{process.memory_bytes / 1_048_576:,.0f} MiB", class_="num"),
        _cell(tag("code", process.configuration)),
    ]


def _used(used: int, limit: int) -> "_Cell":
    return _cell(f"{used:,} of {limit:,}", _bar(used / limit) if limit else "", class_="num")


def _peers(status: Status) -> str:
    if not status.peers:
        return ""
    caption = "Other replicas, as this one last found them; it deals with them only when it has to."
    caption += _rest(len(status.peers), status.peers_total)
    return _section(
        "peers", "Peers", _table(caption, ("Replica", "Address", "State", "Last answer"), map(_peer, status.peers))
    )


def _peer(peer: PeerStatus) -> "Row":
    return [
        _cell(tag("code", peer.id)),
        _cell(tag("code", peer.address)),
        _cell(_badge(_PEERS[peer.state], "not asked yet" if peer.state == "not asked" else peer.state)),
        _cell(ago(peer.last_answer_seconds_ago)),
    ]


def _keys(status: Status) -> Html:
    return _section("keys", "State keys", _table(status.key_phase, ("Key id", "Use"), map(_key, status.keys)))


def _key(key: KeyStatus) -> "Row":
    return [_cell(tag("code", key.id)), _cell(key.role)]


def _footer(refresh_seconds: int | None) -> Html:
    again = (
        join("Loaded again every ", duration(refresh_seconds), " · ", tag("a", "stop", href="status"))
        if refresh_seconds is not None
        else tag("a", f"Load again every {_USUAL_SECONDS} s", href=f"status?refresh={_USUAL_SECONDS}")
    )
    links = (tag("a", "as JSON", href="status.json"), tag("a", "metrics", href="metrics"))
    return tag("footer", again, *(part for link in links for part in (" · ", link)))


# Their parts.


def _section(name: str, title: str, *contents: str) -> Html:
    return tag("section", tag("h2", title, id=name), *contents, aria_labelledby=name)


class _Cell(NamedTuple):
    contents: tuple[str, ...]
    class_: str | None


Row = Sequence[_Cell]


def _cell(*contents: str, class_: str | None = None) -> _Cell:
    return _Cell(contents, class_ if any(contents) else "none")


def _table(caption: str, heads: Sequence[str], rows: Iterable[Row]) -> Html:
    """A table whose rows become cards on a narrow screen; with roles, for style sheets take them from elements."""
    top = tag("tr", *(tag("th", head, scope="col", role="columnheader") for head in heads), role="row")
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", top, role="rowgroup"),
        tag("tbody", *(_row(heads, row) for row in rows), role="rowgroup"),
        role="table",
    )


def _row(heads: Sequence[str], row: Row) -> Html:
    first, *others = row
    cells = [
        tag("td", tag("div", *cell.contents), class_=cell.class_, data_label=head, role="cell")
        for head, cell in zip(heads[1:], others, strict=True)
    ]
    return tag(
        "tr", tag("th", *first.contents, class_=first.class_, scope="row", role="rowheader"), *cells, role="row"
    )


def _words(content: str) -> Html:
    """Text in which what stands between backticks is code."""
    parts = content.split("`")
    if len(parts) % 2 == 0:  # one is without its other
        return text(content)
    return join(*(tag("code", part) if place % 2 else part for place, part in enumerate(parts)))


def _badge(level: str, word: str) -> Html:
    return tag("span", word, class_=f"badge {level}")


def _rest(shown: int, total: int) -> str:
    return f" {shown:,} of {total:,} are shown." if total > shown else ""


def _counted(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def ago(seconds: float | None) -> str:
    """Tell an age in words."""
    if seconds is None:
        return "never"
    return f"{duration(seconds)} ago" if seconds >= 1 else "just now"


def duration(seconds: float) -> str:
    """Tell a duration in its two largest units."""
    whole = max(int(seconds), 0)
    for size, unit, smaller, smaller_unit in _UNITS:
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {smaller_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"
