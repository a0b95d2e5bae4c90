"""What a legacy client says: how it introduces itself."""

import json

import pytest
from msgspec import Raw

from gateway.mirror.client_requests import Profile, of_initialize
from gateway.protocol.errors import InvalidParams

INFO = {"name": "c", "version": "1"}


def of(**params: object) -> Profile:
    params = {"protocolVersion": "2025-11-25", "clientInfo": INFO, "capabilities": {}, **params}
    return of_initialize({key: Raw(json.dumps(value).encode()) for key, value in params.items()})


@pytest.mark.parametrize(
    ("requested", "negotiated", "resumes"),
    [
        ("2025-11-25", "2025-11-25", True),
        ("2025-06-18", "2025-06-18", False),
        ("2024-11-05", "2024-11-05", False),
        ("1999-01-01", "2025-11-25", True),
        ("2026-07-28", "2025-11-25", True),
    ],
)
def test_the_clients_version_is_taken_if_it_is_a_legacy_one(requested: str, negotiated: str, resumes: bool) -> None:  # noqa: FBT001
    profile = of(protocolVersion=requested)
    assert (profile.version, profile.resumes) == (negotiated, resumes)


def test_capabilities_become_those_of_a_modern_client() -> None:
    declared = {
        "elicitation": {},
        "sampling": {"tools": {}},
        "roots": {"listChanged": True},
        "tasks": {"list": {}},
        "extensions": {"io.modelcontextprotocol/tasks": {}, "com.example/x": {"a": 1}},
        "experimental": None,
    }
    profile = of(capabilities=declared)
    assert json.loads(profile.capabilities) == {
        "elicitation": {},
        "sampling": {"tools": {}},
        "roots": {},
        "extensions": {"com.example/x": {"a": 1}},
    }
    declared_now = profile.declared
    assert (declared_now.form, declared_now.url, declared_now.sampling_tools, declared_now.roots) == (
        True,
        False,
        True,
        True,
    )


@pytest.mark.parametrize("asked", [True, False])
def test_the_server_learns_of_state_where_the_route_speaks_the_dialect(*, asked: bool) -> None:
    version, declared = Raw(b'"2025-11-25"'), {"roots": {}, "state": {"scopes": ["session"]}}
    params = {"protocolVersion": version, "capabilities": Raw(json.dumps(declared).encode())}
    profile = of_initialize(params, keeps_state=asked)
    assert profile.keeps_state is asked
    assert json.loads(profile.capabilities) == (declared if asked else {"roots": {}})
    assert not of_initialize({"protocolVersion": version}, keeps_state=asked).keeps_state


def test_large_declarations_lose_what_only_describes() -> None:
    profile = of(
        clientInfo={**INFO, "icons": ["x" * 5_000]},
        capabilities={"elicitation": {"url": {}, "note": "x" * 5_000}, "experimental": {"y": {"z": "x" * 5_000}}},
    )
    assert json.loads(profile.info) == INFO
    assert json.loads(profile.capabilities) == {"elicitation": {"url": {}}}


@pytest.mark.parametrize(
    "params",
    [{"protocolVersion": 7}, {"clientInfo": []}, {"clientInfo": "x"}, {"capabilities": 7}],
)
def test_a_malformed_introduction_is_refused(params: dict[str, object]) -> None:
    with pytest.raises(InvalidParams):
        _ = of(**params)


def test_a_client_without_a_name_is_unknown() -> None:
    assert json.loads(of(clientInfo={}).info) == {"name": "unknown", "version": "0"}
