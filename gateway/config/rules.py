"""Rules between the keys of a configuration."""

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from gateway.config.model.config import Config, Principal, State
from gateway.config.model.route import Credentials, Route, Upstream, UpstreamTls
from gateway.config.parsing.advice import as_reference
from gateway.config.parsing.formats import split_address
from gateway.config.parsing.problems import Problem, nearest
from gateway.config.parsing.state_keys import decode_key
from gateway.config.route_overrides import on_route

_KEYGEN = "make one with `mrtr-gateway keygen`"
_PLAIN_UPSTREAM = Upstream()
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound
"""The addresses that stand for all of a machine, each with the one that reaches it from there."""


def broken_rules(config: Config) -> Iterator[Problem]:
    """Yield a problem for every rule that `config` breaks, with the path of the key to change."""
    yield from _keys(config.state)
    yield from _replica(config)
    yield from _addresses(config)
    yield from _principal(config)
    yield from _routes(config)
    if config.tls.cert_file is None:
        for key in ("key_file", "client_ca_file"):
            if getattr(config.tls, key) is not None:
                yield Problem(f"tls.{key}", "is set without tls.cert_file; give the certificate too, or remove it")
    limits = config.limits
    if (limits.calls_bytes_per_principal or 0) > limits.calls_bytes:
        yield Problem(
            "limits.calls_bytes_per_principal", f"is more than limits.calls_bytes ({limits.calls_bytes}); lower it"
        )


def _keys(state: State) -> Iterator[Problem]:
    seen: dict[bytes, str] = {}
    named = "state.keys_file: key {}" if state.keys_file else "state.keys[{}]:"
    # The keys of a file are counted from 1; those of a list have an index, as in every path.
    keys = [(named.format(place + bool(state.keys_file)), text) for place, text in enumerate(state.keys)]
    keys += [(f"state.session_keys[{place}]:", text) for place, text in enumerate(state.session_keys)]
    for name, text in keys:
        path, _, which = name.partition(":")
        try:
            first = seen.setdefault(decode_key(text), name)
        except ValueError as exc:
            reference = as_reference(text)
            yield Problem(path, f"{which} {exc}; {f'write {reference}' if reference else _KEYGEN}".strip())
        else:
            if first != name:
                yield Problem(path, f"{which} is the same key as {first.replace(':', '')}; remove one of them".strip())


def _replica(config: Config) -> Iterator[Problem]:
    replica = config.replica
    if replica.peers and replica.peers_dns:
        yield Problem("replica.peers_dns", "is set together with replica.peers; keep only one of them")
    if (replica.peers or replica.peers_dns) and not config.state.keys:
        yield Problem(
            "state.keys",
            f"is empty, but peers are set: each replica would refuse what the key of another one sealed; {_KEYGEN}",
        )
    if replica.peers and replica.id is None:
        yield Problem("replica.id", "is missing, but replica.peers is set; name the peer that this replica is")
    elif replica.peers and replica.id not in replica.peers:
        yield Problem("replica.peers", f'does not list "{replica.id}", which is replica.id; list this replica too')
    if (replica.peers or replica.peers_dns) and replica.listen is None:
        yield Problem(
            "replica.listen", "is missing, but peers are set; give the host:port at which they reach this replica"
        )
    named: dict[str, str] = {}
    for name, address in replica.peers.items():
        if (other := named.setdefault(address, name)) != name:
            yield Problem(f"replica.peers.{name}", f"{address} is the address of {other} too; change one")


def _addresses(config: Config) -> Iterator[Problem]:
    taken: dict[str, str] = {"listen": config.listen}
    for path, address in (("admin", config.admin), ("replica.listen", config.replica.listen)):
        if address is None:
            continue
        host, port = split_address(address)
        for other, used in taken.items():
            other_host, other_port = split_address(used)
            # Port 0 is any free port, so two listeners may both ask for it.
            if port == other_port != 0 and (host == other_host or {host, other_host} & WILDCARDS.keys()):
                yield Problem(path, f"{address} is already used by {other} ({used}); choose another port")
        taken[path] = address
    if config.workers > 1 and split_address(config.listen)[1] == 0:
        yield Problem(
            "listen", "is port 0, which picks a free port per process, but workers share one; write the port"
        )


def _principal(config: Config) -> Iterator[Problem]:
    principal = config.principal
    if principal.source != "header" and principal.header:
        yield Problem("principal.header", "is only read with principal.source: header; set that, or remove it")
    if principal.source != "jwt":
        for key in ("issuer", "jwks_url", "jwks_file", "jwks_ca_file", "audience"):
            if getattr(principal, key):
                yield Problem(f"principal.{key}", "is only read with principal.source: jwt; set that, or remove it")
    if principal.source == "jwt":
        yield from _jwt(principal)
    if principal.source != "header":
        return
    if principal.header is None:
        yield Problem(
            "principal.header", "is missing, but principal.source is header; name the header that the proxy sets"
        )
    if not principal.trusted_proxies:
        yield Problem(
            "principal.trusted_proxies", "is empty, so any client could set the header; list the proxy's network"
        )


def _jwt(principal: Principal) -> Iterator[Problem]:
    if principal.issuer is None:
        yield Problem("principal.issuer", "is missing, but principal.source is jwt; write the `iss` of the tokens")
    if (principal.jwks_url is None) == (principal.jwks_file is None):
        count = (
            "neither of jwks_url and jwks_file is" if principal.jwks_url is None else "both jwks_url and jwks_file are"
        )
        yield Problem("principal.jwks_url", f"{count} set; give exactly one")
    if principal.jwks_url is not None:
        parts = urlsplit(principal.jwks_url)
        if parts.scheme == "http" and parts.hostname not in LOOPBACK:
            yield Problem(
                "principal.jwks_url",
                "is http: an attacker on the path could replace the signing keys; give an https url",
            )
    if principal.jwks_ca_file is not None and not (principal.jwks_url or "").startswith("https"):
        yield Problem("principal.jwks_ca_file", "is only read with an https jwks_url; remove it")


def _routes(config: Config) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for place, route in enumerate(config.routes):
        other = first.setdefault(route.path, place)
        if other != place:
            yield Problem(f"routes[{place}].path", f'"{route.path}" is also routes[{other}].path; change one')
        yield from _route(f"routes[{place}]", route)
        if route.sessions.affinity == "principal" and on_route(config, route).sessions.idle_seconds == 0:
            yield Problem(
                f"routes[{place}].sessions.affinity",
                "is principal, but sessions.idle_seconds is 0, so no session is kept; raise sessions.idle_seconds",
            )


def _route(path: str, route: Route) -> Iterator[Problem]:
    upstream = route.upstream
    if (upstream.url is None) == (upstream.command is None):
        text = 'has neither url nor command; add url: "http://127.0.0.1:9000/mcp", or a command'
        if upstream.url is not None:
            text = "has both url and command; remove one"
        yield Problem(f"{path}.upstream", text)
    if upstream.url and upstream.transport == "stdio":
        yield Problem(
            f"{path}.upstream.transport", "is stdio, but stdio has no url; give upstream.command, or another transport"
        )
    yield from _child(f"{path}.upstream", upstream)
    tls = upstream.tls
    if tls != UpstreamTls() and not (upstream.url or "").startswith("https"):
        yield Problem(f"{path}.upstream.tls", "is set, but upstream.url is not https; give an https url, or remove it")
    if tls.key_file is not None and tls.cert_file is None:
        yield Problem(
            f"{path}.upstream.tls.key_file", "is set without cert_file; give the certificate too, or remove it"
        )
    if not tls.verify and (tls.ca_file or tls.server_name):
        yield Problem(
            f"{path}.upstream.tls.verify",
            "is false, so ca_file and server_name have no effect; remove verify, or remove them",
        )
    yield from _credentials(path, route.credentials)
    yield from _headers(path, route)


def _credentials(path: str, credentials: Credentials) -> Iterator[Problem]:
    if credentials.mode == "replace" and credentials.token is None:
        yield Problem(f"{path}.credentials.token", "is missing, but mode is replace; give token or token_file")
    elif credentials.header is None and (credentials.token or "").lower().startswith("bearer "):
        key = "token" if credentials.token_file is None else "token_file"
        yield Problem(f"{path}.credentials.{key}", "begins with Bearer, which the gateway adds; remove that word")
    for key in ("token", "token_file", "header") if credentials.mode != "replace" else ():
        if getattr(credentials, key) is not None:
            yield Problem(f"{path}.credentials.{key}", "is only read with mode: replace; set that, or remove it")


def _headers(path: str, route: Route) -> Iterator[Problem]:
    """A header may be in one list only: it is forwarded, dropped or set."""
    listed = [(name, "forward_headers") for name in route.forward_headers]
    listed += [(name, "drop_headers") for name in route.drop_headers]
    listed += [(name, "set_headers") for name in route.set_headers]
    own = {
        "credentials.header": route.credentials.header,
        "upstream.request_id_header": route.upstream.request_id_header,
    }
    listed += [(name, key) for key, name in own.items() if name is not None]
    first: dict[str, str] = {}
    for (name, key), times in Counter(listed).items():
        if times > 1:
            yield Problem(f"{path}.{key}", f'lists "{name}" {times} times; keep one')
        other = first.setdefault(name, key)
        if other != key:
            yield Problem(f"{path}.{key}", f'lists "{name}", which is in {other} too; keep one')
    for name, times in Counter(route.bind_headers or ()).items():
        if times > 1:
            yield Problem(f"{path}.bind_headers", f'lists "{name}" {times} times; keep one')
        if name not in route.forward_headers:
            meant = nearest(name, route.forward_headers)
            hint = f'did you mean "{meant}"?' if meant else "add it there, or remove it here"
            text = f'lists "{name}", which is not in forward_headers and so does not go upstream; {hint}'
            yield Problem(f"{path}.bind_headers", text)


def _child(path: str, upstream: Upstream) -> Iterator[Problem]:
    if upstream.command is None:
        for key in ("env", "inherit_env", "cwd", "max_children", "new_children_per_second", "warm"):
            if getattr(upstream, key) != getattr(_PLAIN_UPSTREAM, key):
                yield Problem(f"{path}.{key}", "is only used with upstream.command; remove it")
        return
    if upstream.request_id_header is not None:
        yield Problem(f"{path}.request_id_header", "is only used with upstream.url; remove it")
    if upstream.transport not in {"auto", "stdio"}:
        yield Problem(f"{path}.transport", "is for a url, but a command speaks stdio; write stdio or auto")
    if upstream.warm > upstream.max_children:
        yield Problem(f"{path}.warm", f"is more than max_children ({upstream.max_children}); lower it")
    for key, texts in (("command", upstream.command), ("env", upstream.env.values()), ("cwd", [upstream.cwd or ""])):
        if any("\0" in text for text in texts):
            yield Problem(f"{path}.{key}", "has a NUL character, which cannot be passed to a process; remove it")
