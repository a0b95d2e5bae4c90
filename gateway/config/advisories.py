"""Warnings about risky settings: cautions for the log of every start or reload, notes for `check`."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from gateway import world
from gateway.config.model.config import Config
from gateway.config.parsing.formats import split_address
from gateway.config.parsing.state_keys import decode_key
from gateway.config.route_overrides import on_route
from gateway.config.rules import LOOPBACK, WILDCARDS
from gateway.config.tls import Validity
from gateway.protocol.errors import DescriptorsShort

_OF_CONNECTIONS = {f"x-forwarded-{word}" for word in ("by", "for", "host", "port", "prefix", "proto", "server", "ssl")}

_MOMENT = "%Y-%m-%d %H:%M UTC"
_OWN_DESCRIPTORS = 16
"""What a process without calls has open: listeners, pipes, the log."""
_FEWEST_DIFFERENT_BYTES = 12
"""Random keys of 32 bytes have more."""
SOON = timedelta(days=14)
"""When the alert about a certificate fires, too."""
_UNITS = ((86_400, "days"), (3600, "h"), (60, "min"))
_OF_TRACERS = {"b3", "baggage", "sentry-trace", "traceparent", "tracestate", "uber-trace-id", "x-amzn-trace-id"}
_OF_TRACERS |= {"x-cloud-trace-context", "x-datadog-parent-id", "x-datadog-trace-id"}
_OF_TRACERS |= {"x-b3-parentspanid", "x-b3-spanid", "x-b3-traceid"}
_OF_ONE_REQUEST = _OF_TRACERS | {"correlation-id", "x-correlation-id", "x-request-id"}


def cautions(config: Config, certificates: Validity, *, is_served: bool = False) -> Iterator[str]:
    """Yield a warning for each risky setting, with the path of its key, and for each certificate that is not right.

    The last clause of each is its fix, behind the only semicolon. `is_served` if it is the configuration of this
    process, which reloads it at a signal.
    """
    if config.debug.bodies:
        yield (
            "debug.bodies is true: the log contains what users typed and tools answered, and masks only what looks "
            "like a secret; set it to false when the fault is found"
        )
    command = reload_command(config) if is_served else "kill -HUP PID"
    yield from _of_certificates(certificates, f"renew it, then run `{command}`")
    yield from _of_trust(config)
    yield from _of_sessions(config)
    files, calls = resource.getrlimit(resource.RLIMIT_NOFILE)[1], config.hold.max_calls
    fit = max(files - world.kept_descriptors(files) - _OWN_DESCRIPTORS, 0) // 2
    if is_served and files > 0 and fit < calls and any(route.upstream.url for route in config.routes):
        yield (
            f"ulimit -n is {files}, and each held call takes two descriptors: new calls are refused when {fit} are "
            f"held, or sooner with client connections, although hold.max_calls is {calls}; {DescriptorsShort.fix}"
        )
    local = split_address(config.listen)[0] in LOOPBACK
    for route in config.routes:
        path = f"routes[{route.path}]"
        if not route.upstream.tls.verify:
            yield (
                f"{path}.upstream.tls.verify is false: an attacker on the path can impersonate the upstream; "
                "give the upstream's CA in ca_file instead"
            )
        # Some proxies send a credential as `x-forwarded-access-token`.
        forwarded = [name for name in route.forward_headers if name.startswith("x-forwarded-")]
        unbound = [name for name in forwarded if name not in _OF_CONNECTIONS]
        if unbound and route.bind_headers is None:
            yield (
                f"{path}.forward_headers has {', '.join(unbound)}, which requestStates are not bound to by default; "
                "set bind_headers, and list there each one that is a credential"
            )
        if own := [name for name in route.forward_headers if name in _OF_ONE_REQUEST]:
            them = "it" if len(own) == 1 else "them"
            yield (
                f"{path}.forward_headers has {', '.join(own)}, and each new value opens a session of its own at the "
                f"upstream; remove {them}: upstream.request_id_header sends the id of each request without that, and "
                "traces: true sends the trace context"
            )
        if route.credentials.mode == "replace" and config.principal.source == "authorization" and not local:
            yield (
                f"{path}.credentials.mode is replace, but callers are not verified: every client that reaches "
                f"{config.listen} acts with the gateway's credential; set principal.source to jwt or header"
            )


def reload_command(config: Config) -> str:
    """Return the command that makes this process read its file again."""
    return f"kill -HUP {os.getppid() if config.workers > 1 else os.getpid()}"  # a supervisor reloads its workers


def _of_trust(config: Config) -> Iterator[str]:
    principal = config.principal
    for network in principal.trusted_proxies:
        if network.endswith("/0"):
            yield (
                f"principal.trusted_proxies has {network}, so any client can set the header; list the proxy's network"
            )
    if principal.source == "jwt" and not principal.audience:
        yield (
            "principal.audience is empty, so a token that the issuer made for another service is valid here too; "
            "list the `aud` of the tokens"
        )


def _of_sessions(config: Config) -> Iterator[str]:
    """Yield the limits of sessions that held calls reach first, unless a route has more: one may spare its server."""
    held = [route for route in config.routes if route.upstream.url and route.era != "mirror"]
    held = [route for route in held if (route.continuation, route.sessions.affinity) == ("hold", "none")]
    keys = (("max", "max_calls", 503), ("max_per_principal", "max_calls_per_principal", 429))
    for key, of_hold, status in keys[: 1 if config.hold.cold_seconds else 2]:  # cold calls have none, but count here
        limits, calls = {}, getattr(config.hold, of_hold)
        for route in held:
            where = "" if getattr(route.sessions, key) is None else f"routes[{route.path}]."
            limits[f"{where}sessions.{key}"] = getattr(on_route(config, route).sessions, key)
        if all(most <= calls for most in limits.values()):
            for name, most in limits.items():
                yield (
                    f"{name} ({most}) is not more than hold.{of_hold} ({calls}), and each held call takes a session: "
                    f"when held calls have all, further requests wait {config.timeouts.session_wait_seconds:g} s "
                    f"and get {status}, even a tools/list; raise the first, or lower the second"
                )


def _of_certificates(certificates: Validity, renew: str) -> Iterator[str]:
    now = datetime.fromtimestamp(world.wall(), UTC)
    for key, (begins, ends) in certificates.items():
        if key.endswith("ca_file"):
            refused = "the gateway refuses every certificate that it signed"
        elif key == "tls.cert_file":
            refused = "clients refuse it"
        else:
            refused = "the upstream refuses it"
        if now < begins:
            yield f"{key} is not valid before {begins:{_MOMENT}}, so {refused}; check the clock, or replace it"
        elif ends <= now:
            yield f"{key} has expired ({ends:{_MOMENT}}), so {refused}; {renew}"
        elif ends - now < SOON:
            yield f"{key} expires on {ends:{_MOMENT}}, in {_rounded((ends - now).total_seconds())}; {renew}"


def _rounded(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def notes(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that is right for some gateways and a mistake for others."""
    if split_address(config.listen)[0] not in LOOPBACK:
        if not config.state.keys:
            yield (
                f"state.keys is empty, but listen ({config.listen}) is not on loopback: a restart ends all calls that "
                "wait for answers, and no second replica can open their states; run `mrtr-gateway keygen` and set it"
            )
        if not config.security.allowed_hosts:
            yield (
                f"security.allowed_hosts is empty, but listen ({config.listen}) is not on loopback: the gateway "
                "serves any Host, which permits DNS rebinding; list the names that clients use"
            )
    yield from _of_keys(config)
    yield from _of_processes(config)
    largest, share = config.limits.body_bytes, config.limits.share_of_calls_bytes
    if share < 2 * largest:
        yield (
            f"limits.calls_bytes_per_principal ({share}) is less than twice limits.body_bytes ({largest}), which one "
            "call may take: the largest calls are always refused; raise it, or limits.calls_bytes"
        )
    yield from _of_callers(config)
    for route in config.routes:
        hold, ttl = on_route(config, route).hold.ttl_seconds, config.state.ttl_seconds
        if hold > ttl:
            yield (
                f"routes[{route.path}]: hold.ttl_seconds ({hold:g}) is more than state.ttl_seconds ({ttl:g}), which "
                "ends the wait earlier; raise state.ttl_seconds too"
            )
        is_identified = config.principal.source in ("jwt", "header")
        if route.upstream.command is not None and is_identified and route.sessions.affinity == "none":
            yield (
                f"routes[{route.path}].sessions.affinity is none, so calls of one caller may meet different processes "
                "of the server, which share no memory; set it to principal if the server remembers anything"
            )
        if route.upstream.url is not None and _is_listener(route.upstream.url, config.listen):
            yield (
                f"routes[{route.path}].upstream.url leads to listen ({config.listen}), so the gateway would call "
                "itself; give the URL of the server, or another port to one of them"
            )


def _of_callers(config: Config) -> Iterator[str]:
    """Yield the limits of which one caller can have all."""
    limits = {"hold.max_calls": (config.hold.max_calls, config.hold.max_calls_per_principal)}
    for route in config.routes:
        sessions, own = on_route(config, route).sessions, (route.sessions.max, route.sessions.max_per_principal)
        where = "" if own == (None, None) else f"routes[{route.path}]."
        limits[f"{where}sessions.max"] = sessions.max, sessions.max_per_principal
    for key, (most, of_one) in limits.items():
        if most <= of_one:
            yield (
                f"{key} ({most}) is not more than {key}_per_principal ({of_one}), so one caller can take all places; "
                "lower the second, unless all clients are one caller"
            )


def _of_keys(config: Config) -> Iterator[str]:
    for place, text in enumerate(config.state.keys):
        with suppress(ValueError):  # `check` remarks on a configuration that has errors, too
            if len(set(decode_key(text))) < _FEWEST_DIFFERENT_BYTES:
                yield f"state.keys[{place}] can be guessed: its bytes repeat; make one with `mrtr-gateway keygen`"


def _of_processes(config: Config) -> Iterator[str]:
    if config.workers > (processors := len(os.sched_getaffinity(0))):
        yield f"workers ({config.workers}) is more than the processors of this machine ({processors}); lower it"
    replica = config.replica
    reached, bound = replica.peers.get(replica.id or ""), replica.listen
    if reached and bound and split_address(reached)[1] != split_address(bound)[1]:
        yield (
            f"replica.listen ({bound}) has another port than {reached}, where peers reach this replica; "
            "correct one, unless the port is mapped"
        )


def _is_listener(url: str, listen: str) -> bool:
    """Whether a URL leads to the gateway's own listener, as far as the texts show."""
    (host, port), parts = split_address(listen), urlsplit(url)
    own = LOOPBACK if host in LOOPBACK or host in WILDCARDS else {host}
    return port == (parts.port or {"http": 80, "https": 443}.get(parts.scheme)) and parts.hostname in own
