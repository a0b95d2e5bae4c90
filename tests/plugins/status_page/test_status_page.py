"""The status page as HTML; a browser looks at it in tests/e2e."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway import world
from gateway.plugins.status_page import status_page
from gateway.plugins.status_page.documents import TITLES
from gateway.plugins.status_page.merge_statuses import cut, failing_first
from gateway.plugins.status_page.status_page import every_seconds, page
from gateway.telemetry.metrics.registry import BudgetStatus
from gateway.telemetry.process_status import (
    MOST_HELD,
    CallerStatus,
    ErrorStatus,
    Failure,
    KeyStatus,
    PeerStatus,
    ProcessStatus,
    Status,
    StatusNotice,
)
from tests.support.status import held, process, route, status_of

ENDS = "pid 7 draining ends in 25 s or sooner calls lost if it ends: 1 0 s 1 of 2"
SINCE = "since 00:00:10 UTC (1 min 30 s)"
FAILING = f"auto, era not known yet failing {SINCE} Last failure 1 s ago, no answer known since"
RUNNING = "3 running calls, the oldest for 50 s"
SHOWN = [
    "gw-1: ready, 1 problem - mrtr-gateway",
    "Held calls 1 of 2",
    "Upstreams failing 1 of 2, as far as known",
    "Errors 2 listed below",
    "Needs attention",
    f"The upstream of /b is failing {SINCE}; it last failed 1 s ago The cause The fix",
    "A caution",
    "Routes",
    f"/b [status?route=/b] http://b/mcp {FAILING} 2 of 10 2 busy 1 none",
    f"/a [status?route=/a] http://a auto, era not known yet answered just now {RUNNING} 2 of 10 2 busy 4 none",
    "Replicas",
    f"gw-1#0 [status?replica=gw-1] {ENDS} 3 of 1,000 5 of 100 0.0 MiB cold: 1.0 MiB of 2.0 MiB aaa loaded 3 min ago",
    "gw-3 silent",
    "Running calls",
    "tools/call t /mcp the server's response 50 s 49 s r-1 gw-1 if it ends: lost c",
    "Held calls",
    "tools/call t /mcp elicitation 1 1 min 1 s 9 min r-2 gw-1 if it ends: run again c",
    "tools/call t /mcp the client's next request 2 1 s running gw-1 c",
    "Recent errors",
    "upstream_unreachable Text Fix 2 2 s ago 1 min 30 s ago /b",
    "Peers",
    "gw-3 [status?replica=gw-3] 10.0.0.3:1 dead 5 s ago",
    "State keys",
    "abc only opens",
]


def visible(html: str) -> list[str]:
    """The text of a page, with the addresses of its links; a row of a table is a line."""
    html = re.sub("(?s)<style.*?</style>|<svg.*?</svg>|\n", " ", html[html.index("<title>") :])
    html = re.sub('<a href="([^"]*)">(.*?)</a>', r"\2 [\1]", html)
    html = re.sub("</(?:title|header|dd|li|h2|caption|tr)>", "\n", html)
    return [" ".join(line.split()) for line in unescape(re.sub("<[^>]*>", " ", html)).splitlines()]


def test_what_the_page_of_a_cluster_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "wall", lambda: 100.0)
    failure = Failure(kind="k", cause="The cause", fix="The fix", seconds_ago=1, since_seconds_ago=90)
    budgets = {name: BudgetStatus(used, 2 << 20, 0) for name, used in (("cold", 1 << 20), ("unused", 99))}
    limits = {"held": 1, "held_limit": 2, "connections": 3, "connections_limit": 1000}
    limits |= {"open_files": 5, "open_files_limit": 100, "loaded_seconds_ago": 180}
    usual: dict[str, Any] = {"waiting": 0, "subscriptions": 0, "sessions": {"busy": 2}}
    routes = (
        route(
            path="/a",
            upstream="http://a",
            held=4,
            health="ok",
            last_ok_seconds_ago=0,
            oldest_call_seconds=50,
            running=3,
            **usual,
        ),
        route(path="/b", upstream="http://b/mcp", health="failing", last_failure=failure, **usual),
    )
    parked = replace(held(61.0), expires_in_seconds=540, asked=("elicitation",), at_end="run again", request_id="r-2")
    runs = replace(
        held(1.0),
        running_seconds=50,
        silent_seconds=49,
        request_id="r-1",
        waits_for="the server's response",
        at_end="lost",
    )
    waits = replace(held(1.0), expires_in_seconds=None, round=2, waits_for="the client's next request")
    texts = {"kind": "upstream_unreachable", "route": "/b", "text": "Text", "fix": "Fix"}
    error = ErrorStatus(**texts, count=2, first_seconds_ago=90, last_seconds_ago=2)
    status = status_of(
        replace(process(0), pid=7, state="draining", ends_in_seconds=25, lost_at_end=1, budgets=budgets, **limits),
        ProcessStatus(id="gw-3", state="silent"),
        covers="cluster",
        notices=(StatusNotice("A caution", is_bad=False),),
        routes=tuple(failing_first(routes)),
        routes_total=2,
        held=(parked, waits),
        held_total=1,
        running=(runs,),
        running_total=1,
        errors=(error,),
        peers=(PeerStatus(id="gw-3", address="10.0.0.3:1", state="dead", last_answer_seconds_ago=5),),
        keys=(KeyStatus("abc", "only opens"),),
    )
    lines = visible(page(status))
    assert [line for line in lines if line in SHOWN] == SHOWN
    assert "the whole cluster" in lines[1]
    assert "Reload every 10 s [status?refresh=10] · as JSON [status.json] · metrics [metrics]" in lines[1]
    assert re.findall(r"\[docs/(.*?)\]", lines[-1]) == list(TITLES)


def test_the_oldest_calls_are_shown_and_all_are_counted() -> None:
    ages = [float(number * 7 % 300) for number in range(300)]
    status = cut(status_of(held=tuple(map(held, ages)), held_total=300))
    assert [call.age_seconds for call in status.held] == sorted(ages, reverse=True)[:MOST_HELD]
    assert f"{MOST_HELD} of 300 are shown" in page(status)
    whole = "The page of each replica lists its own."
    assert (whole in page(status), whole in page(replace(status, covers="cluster"))) == (False, True)


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, None), ("10", 10), ("0", 2), ("x", None), ("99999", None), ("1'", None), ("", None)]
)
async def test_the_page_loads_itself_again_only_where_that_was_asked_for(
    asked: str | None, seconds: int | None
) -> None:
    assert every_seconds(asked) == seconds
    html = page(status_of(process(0)), every_seconds(asked))
    assert (f'http-equiv="refresh" content="{seconds}"' in html) == (seconds is not None)


def test_one_route_can_be_shown_alone_and_the_links_keep_it() -> None:
    routes = tuple(replace(route(), path=path, held=number) for number, path in enumerate(("/one", "/two & more"), 1))
    calls = tuple(replace(held(1.0), route=each.path, name=f"tool of {each.path}") for each in routes)
    status = status_of(process(0), routes=routes, routes_total=2, held=calls, held_total=3)
    both = page(status)
    assert 'href="status?route=/one"' in both
    assert 'href="status?route=/two%20%26%20more"' in both
    alone = page(status, None, "/two & more")
    assert "tool of /two" in alone
    assert "tool of /one" not in alone
    assert 'href="status?refresh=10&route=/two%20%26%20more"' in alone.replace("&amp;", "&")
    assert page(status, None, "/unknown") == both


class Evil:
    """Makes a hostile text for each field, which names its field so that the test can look for it."""

    MARKUP = "\"><script>alert(1)</script><img src=x onerror=alert(2)>' `<b>` {{ 7 * 7 }}"

    def __init__(self) -> None:
        self.fields: list[str] = []

    def __getitem__(self, field: str) -> str:
        self.fields.append(field)
        return field + self.MARKUP


def hostile(evil: Evil) -> Status:
    """A status of which every displayed text is hostile."""
    failure = Failure(kind="k", cause=evil["cause"], fix=evil["fix"], seconds_ago=1)
    texts = {field: evil[f"route-{field}"] for field in ("path", "upstream", "transport", "continuation")}
    failing = route(**texts, sessions={evil["session-state"]: 1}, last_failure=failure, health="failing")
    texts = {
        field: evil[f"held-{field}"]
        for field in ("route", "method", "name", "owner", "caller", "client", "request_id")
    }
    run = {field: evil[f"running-{field}"] for field in (*texts, "waits_for")}
    error = ErrorStatus(
        **{field: evil[f"error-{field}"] for field in ("kind", "route", "text", "fix")},
        count=1,
        first_seconds_ago=1,
        last_seconds_ago=1,
    )
    return Status(
        **{field: evil[field] for field in ("version", "replica", "state", "time", "configuration", "key_phase")},
        uptime_seconds=1,
        notices=(StatusNotice(evil["notice-text"], evil["notice-fix"], evil["notice-detail"]),),
        processes=(ProcessStatus(id=evil["process-id"], state="ready", configuration=evil["process-configuration"]),),
        routes=(failing,),
        held=(replace(held(1), **texts, asked=(evil["held-asked"],)),),
        callers=(CallerStatus(caller=evil["caller"], held=1, sessions=1, clients={evil["clients"]: 1}),),
        addresses={evil["addresses"]: 1},
        running=(replace(held(1), **run),),
        peers=(PeerStatus(id=evil["peer"], address=evil["address"], state="dead", last_answer_seconds_ago=1),),
        keys=(KeyStatus(evil["key"], "only opens"),),
        errors=(error,),
    )


@pytest.mark.parametrize("health", ["ok", "failing"])
def test_a_hostile_text_in_any_displayed_field_stays_text(health: Any) -> None:
    evil = Evil()
    status = hostile(evil)
    html = page(replace(status, routes=(replace(status.routes[0], health=health),)))
    tags = set(re.findall(r"<\s*([a-zA-Z]+)", html))
    assert not tags & {"script", "img", "b"}
    shown = unescape(re.sub("<[^>]*>", "", html))
    for field in evil.fields:
        expected = f"{field}{evil.MARKUP}"
        if field != "fix" or health == "failing":
            assert expected in shown or expected.replace("`", "") in shown, field


@pytest.mark.parametrize("name", ["status.html", "document.html", "status.css"])
def test_the_templates_and_the_style_sheet_are_part_of_the_package(name: str) -> None:
    assert (Path(status_page.__file__).parent / name).is_file()
