"""Warnings about settings that are allowed but risky."""

import os
import re
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import Config, cautions, notes, validity
from tests.support.authority import Authority
from tests.support.configurations import (
    KEY,
    good,
    with_route,
)

SECRET = "s3cret-of-the-gateway"


def given(config: Config) -> list[str]:
    said = list(cautions(config, validity(config)))
    assert all(sentence.count("; ") == 1 for sentence in said), "doctor tells the fix apart"
    return said


def test_a_credential_of_the_gateway_for_unverified_callers_is_a_warning() -> None:
    replace = {"mode": "replace", "token": SECRET}
    assert not given(with_route(credentials=replace)), "loopback"
    open_to_all = {"listen": "0.0.0.0:8080"}
    (said,) = given(with_route(open_to_all, credentials=replace))
    assert said.startswith("routes[/a].credentials.mode is replace, but callers are not verified")
    verified = {"principal": {"source": "jwt", "issuer": "i", "jwks_url": "https://a/j", "audience": ["a"]}}
    assert not given(with_route({**open_to_all, **verified}, credentials=replace))
    assert msgspec.json.encode([said]).find(SECRET.encode()) < 0


def test_a_forwarded_header_that_may_be_an_unbound_credential_is_a_warning() -> None:
    names = ["x-api-key", "x-forwarded-for", "x-forwarded-access-token"]
    (said,) = given(with_route(forward_headers=names))
    assert said.startswith(
        "routes[/a].forward_headers has x-forwarded-access-token, which requestStates are not bound to"
    )
    for bound in ([], names[:1], names[2:]):
        assert not given(with_route(forward_headers=names, bind_headers=bound))
    assert not given(with_route(forward_headers=names[:2]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "principal: {source: header, header: x-a, trusted_proxies: ['::/0']}\n",
            "principal.trusted_proxies has ::/0, so any client can set the header",
        ),
        ("principal: {source: jwt, issuer: i, jwks_url: 'https://a/j'}\n", "principal.audience is empty, so a token"),
    ],
)
def test_a_setting_that_lets_anybody_in_is_a_warning(text: str, said: str) -> None:
    (found,) = given(good(text))
    assert found.startswith(said)


def test_a_key_that_repeats_and_processes_that_do_not_fit_are_noted() -> None:
    (found,) = notes(good(f"state: {{keys: ['{'00' * 32}']}}\n"))
    assert found.startswith("state.keys[0] can be guessed: its bytes repeat")
    (found,) = notes(good(f"workers: {len(os.sched_getaffinity(0)) + 1}\n"))
    assert "is more than the processors of this machine" in found
    peers = f"state: {{keys: ['{KEY}']}}\nreplica: {{id: a, listen: '127.0.0.1:1', peers: {{a: 'x:%d', b: 'y:1'}}}}\n"
    (found,) = notes(good(peers % 2))
    assert found.startswith("replica.listen (127.0.0.1:1) has another port than x:2")
    assert not list(notes(good(peers % 1)))


def test_places_that_one_caller_can_take_are_noted() -> None:
    assert not list(notes(good("")))
    (found,) = notes(good("hold: {max_calls: 12}\n"))
    assert found == (
        "hold.max_calls (12) is not more than hold.max_calls_per_principal (1000), so one caller can take all places; "
        "lower the second, unless all clients are one caller"
    )
    (found,) = notes(good("hold: {max_calls_per_principal: 10000}\n"))
    assert found.startswith("hold.max_calls (10000) is not more")
    assert not list(notes(good("hold: {max_calls: 12, max_calls_per_principal: 11}\n")))
    (found,) = notes(with_route(sessions={"max": 1100}))
    assert found == (
        "routes[/a].sessions.max (1100) is not more than routes[/a].sessions.max_per_principal (1100), so one caller "
        "can take all places; lower the second, unless all clients are one caller"
    )
    (found,) = notes(with_route({"sessions": {"max": 20}}))
    assert found.startswith("sessions.max (20) is not more than sessions.max_per_principal (1100), ")
    assert not list(notes(with_route(sessions={"max": 1101})))


def test_fewer_sessions_than_held_calls_are_a_warning() -> None:
    (found,) = given(with_route({"sessions": {"max": 10_000}}))
    assert found == (
        "sessions.max (10000) is not more than hold.max_calls (10000), and each held call takes a session: when held "
        "calls have all, further requests wait 10 s and get 503, even a tools/list; raise the first, or lower the "
        "second"
    )
    (found,) = given(with_route({"hold": {"max_calls_per_principal": 2000}, "timeouts": {"session_wait_seconds": 3}}))
    assert found.startswith("sessions.max_per_principal (1100) is not more than hold.max_calls_per_principal (2000), ")
    assert "wait 3 s and get 429" in found
    (found,) = given(with_route(sessions={"max": 20}))
    assert found.startswith("routes[/a].sessions.max (20) is not more than hold.max_calls (10000), ")
    assert not given(with_route({"sessions": {"max": 20}}, sessions={"max": 10_001})), "its own limit counts"


@pytest.mark.parametrize(
    "route",
    [
        {"upstream": {"command": ["cat"]}},  # has max_children
        {"era": "mirror"},
        {"continuation": "replay"},
        {"sessions": {"affinity": "principal"}},
    ],
)
def test_sessions_that_no_held_call_takes_may_be_few(route: dict[str, Any]) -> None:
    few = {"sessions": {"max": 5, "max_per_principal": 5}}
    assert len(given(with_route(few))) == 2
    assert not given(with_route(few, **route))


@pytest.mark.parametrize(
    ("limits", "told"), [((20, 10_001), []), ((20, 30), ["routes[/0].sessions.max", "routes[/1].sessions.max"])]
)
def test_a_route_may_have_few_sessions_if_others_have_more_than_are_held(
    limits: tuple[int, int], told: list[str]
) -> None:
    routes = [
        {"path": f"/{place}", "upstream": {"url": f"http://a:1{place}/mcp"}, "sessions": {"max": most}}
        for place, most in enumerate(limits)
    ]
    assert [each.split()[0] for each in given(with_route({"routes": routes}))] == told


def test_cold_calls_count_for_their_caller_without_a_session() -> None:
    few = {"sessions": {"max": 5, "max_per_principal": 5}}
    (found,) = given(with_route({**few, "hold": {"cold_seconds": 1}}))
    assert found.startswith("sessions.max (5)")


def test_a_forwarded_header_that_differs_in_each_request_is_a_warning() -> None:
    (said,) = given(with_route(forward_headers=["x-team", "traceparent", "x-request-id"]))
    assert said.startswith("routes[/a].forward_headers has traceparent, x-request-id, and each new value opens a ses")
    assert "; remove them: upstream.request_id_header sends the id" in said
    assert "traces: true sends" in said


@pytest.mark.parametrize(
    "name", ["b3", "x-b3-traceid", "X-Amzn-Trace-Id", "x-datadog-trace-id", "sentry-trace", "Correlation-Id"]
)
def test_so_is_each_tracers_own_header(name: str) -> None:
    (said,) = given(with_route(forward_headers=[name]))
    assert f"{name.lower()}, and each new value opens a session of its own at the upstream; remove it: " in said


@pytest.mark.parametrize(
    ("days", "since", "said", "more"),
    [
        (20, -20, None, ""),
        (20, 1, "is not valid before 20", "; check the clock, or replace it"),
        (-1, -20, "has expired (20", "; renew it, then run `kill -HUP PID`"),
        (13.1, -20, "expires on 20", ", in 13 days; renew it"),
        (1 / 12, -20, "expires on 20", ", in 2 h; renew it"),
        (0.05, -20, "expires on 20", ", in 72 min; renew it"),
        (60 / 86_400, -20, "expires on 20", " s; renew it"),
    ],
)
def test_a_certificate_outside_of_its_time_or_near_its_end_is_a_warning(
    tmp_path: Path, days: float, since: int, said: str | None, more: str
) -> None:
    shown = str(Authority(tmp_path).sign("shown", days=days, since=since))
    listener = {"tls": {"cert_file": shown, "client_ca_file": shown}}
    found = given(
        with_route(listener, upstream={"url": "https://a/mcp", "tls": {"cert_file": shown, "ca_file": shown}})
    )
    upstream = "routes[/a].upstream.tls."
    keys = ("tls.cert_file", "tls.client_ca_file", f"{upstream}ca_file", f"{upstream}cert_file") if said else ()
    assert sorted(sentence.split()[0] for sentence in found) == sorted(keys)
    assert all(f" {said}" in sentence and more in sentence for sentence in found)


def test_who_refuses_an_expired_certificate_is_told(tmp_path: Path) -> None:
    shown = str(Authority(tmp_path).sign("shown", days=-1))
    tls = {"cert_file": shown, "ca_file": shown}
    config = with_route({"tls": {"cert_file": shown}}, upstream={"url": "https://a/mcp", "tls": tls})
    told = {sentence.partition(" ")[0]: sentence for sentence in given(config)}
    assert "so clients refuse it;" in told["tls.cert_file"]
    assert "so the upstream refuses it;" in told["routes[/a].upstream.tls.cert_file"]
    assert "so the gateway refuses every certificate that it signed;" in told["routes[/a].upstream.tls.ca_file"]


def test_authorities_are_no_warning_as_long_as_one_of_them_is_valid(tmp_path: Path) -> None:
    authority, bundle = Authority(tmp_path), tmp_path / "bundle.pem"
    old, new = authority.sign("old", days=-1), authority.sign("new")
    bundle.write_bytes(old.read_bytes() + new.read_bytes())
    assert not given(with_route(upstream={"url": "https://a/mcp", "tls": {"ca_file": str(bundle)}}))
    shown = {"tls": {"cert_file": str(bundle)}, "workers": 2, "hold": {"max_calls": 1001}}
    config = with_route(shown, upstream={"url": "https://a/mcp"})
    (said,) = cautions(config, validity(config), is_served=True)
    assert said.endswith(f"run `kill -HUP {os.getppid()}`"), "the supervisor"


def test_more_held_calls_than_descriptors_are_a_warning_of_the_process_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(most: int, config: Config, *, is_served: bool = True) -> list[str]:
        monkeypatch.setattr("resource.getrlimit", lambda _: (most, most))
        return list(cautions(config, validity(config), is_served=is_served))

    (found,) = said(300, good())
    assert found.startswith(
        "ulimit -n is 300, and each held call takes two descriptors: new calls are refused when 115 "
    )
    assert found.count("; ") == 1
    assert "refused when 9999 are held, " in said(20_287, good())[0]
    assert not said(20_288, good())
    assert "refused when 0 are held, " in said(20, good())[0]
    assert not said(1_048_576, good()), "the default of both"
    assert not said(resource.RLIM_INFINITY, good())
    few = good("hold: {max_calls: 1000, max_calls_per_principal: 100}\nlimits: {connections: 1}\n")
    (fix,) = re.findall(r" to 2 x hold.max_calls \+ limits.connections \+ (\d+), ", found)
    assert not said(2 * 1000 + 1 + int(fix), few), "what the fix asks for is enough"
    assert not said(300, good(), is_served=False), "`check` and `doctor` have another limit"
    assert not said(300, with_route(upstream={"command": ["true"]})), "a child has its pipes already"


def test_messages_in_the_log_and_an_unverified_upstream_are_warnings() -> None:
    (logged,) = given(with_route({"debug": {"bodies": True}}))
    assert logged.startswith("debug.bodies is true: the log contains what users typed")
    (unverified,) = given(with_route(upstream={"url": "https://a/mcp", "tls": {"verify": False}}))
    assert unverified.startswith("routes[/a].upstream.tls.verify is false: an attacker on the path can impersonate")


KEYS = {"state": {"keys": [KEY]}}
PUBLIC = {"listen": "0.0.0.0:8080"}
NAMED = {"security": {"allowed_hosts": ["mcp.example"]}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({**PUBLIC, **KEYS, **NAMED}, []),
        ({**PUBLIC, **NAMED}, ["state.keys is empty"]),
        ({**PUBLIC, **KEYS}, ["security.allowed_hosts is empty"]),
        ({"hold": {"ttl_seconds": 600}}, []),
        ({"limits": {"calls_bytes": 32 << 20}}, []),
        ({"limits": {"calls_bytes": 24 << 20}}, ["limits.calls_bytes_per_principal (6291456) is less than twice"]),
        ({"limits": {"calls_bytes_per_principal": 1}}, ["limits.calls_bytes_per_principal (1) is less than twice"]),
        ({"hold": {"ttl_seconds": 601}}, ["routes[/a]: hold.ttl_seconds (601) is more than state.ttl_seconds (600)"]),
    ],
)
def test_a_setting_that_may_be_a_mistake_is_noted(sections: dict[str, Any], said: list[str]) -> None:
    found = list(notes(with_route(sections)))
    assert len(found) == len(said)
    assert all(sentence.startswith(words) for sentence, words in zip(found, said, strict=True))


def test_a_route_with_a_longer_hold_of_its_own_is_noted() -> None:
    (said,) = notes(with_route(hold={"ttl_seconds": 700}))
    assert said.startswith("routes[/a]: hold.ttl_seconds (700)")


@pytest.mark.parametrize(
    ("listen", "url", "is_itself"),
    [
        ("127.0.0.1:8080", "http://localhost:8080/mcp", True),
        ("0.0.0.0:8080", "http://127.0.0.1:8080/mcp", True),
        ("[::1]:80", "http://127.0.0.1/mcp", True),
        ("10.0.0.1:8080", "http://10.0.0.1:8080/mcp", True),
        ("127.0.0.1:8080", "http://127.0.0.1:9000/mcp", False),
        ("127.0.0.1:8080", "http://mcp.example:8080/mcp", False),
        ("10.0.0.1:8080", "http://127.0.0.1:8080/mcp", False),
    ],
)
def test_an_upstream_that_is_the_gateway_itself_is_noted(listen: str, url: str, *, is_itself: bool) -> None:
    config = with_route({"listen": listen, **KEYS, **NAMED}, upstream={"url": url})
    said = [sentence for sentence in notes(config) if "would call itself" in sentence]
    assert [sentence.startswith("routes[/a].upstream.url leads to listen") for sentence in said] == [True] * is_itself


@pytest.mark.parametrize(
    ("source", "affinity", "is_noted"),
    [("header", "none", True), ("header", "principal", False), ("authorization", "none", False)],
)
def test_identified_callers_of_a_command_are_better_served_by_one_child_each(
    source: str, affinity: str, *, is_noted: bool
) -> None:
    """Anonymous callers are one principal, and must not share the memory of a server."""
    principal = {"source": source, "header": "x-user", "trusted_proxies": ["127.0.0.0/8"]}
    config = with_route(
        {"principal": principal if source == "header" else {}},
        upstream={"command": ["server"]},
        sessions={"affinity": affinity},
    )
    assert bool([sentence for sentence in notes(config) if "sessions.affinity is none" in sentence]) is is_noted
