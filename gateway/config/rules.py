"""What a configuration must satisfy as a whole: rules between keys, and what this version cannot do yet."""

from collections import Counter
from collections.abc import Callable, Iterator

from gateway.config.forms import split_address
from gateway.config.keys import decode_key
from gateway.config.model import Config, Route, State, Upstream
from gateway.config.problems import Problem

_KEYGEN = "make one with `mrtr-gateway keygen`"
_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound


def broken_rules(config: Config) -> Iterator[Problem]:
    """Yield every rule that `config` breaks, by the path to change."""
    yield from _keys(config.state)
    yield from _replica(config)
    yield from _addresses(config)
    yield from _principal(config)
    yield from _routes(config.routes)
    yield from _not_yet(config)


def _keys(state: State) -> Iterator[Problem]:
    seen: dict[bytes, str] = {}
    for place, text in enumerate(state.keys):
        path = f"state.keys_file key {place + 1}" if state.keys_file else f"state.keys[{place}]"
        try:
            first = seen.setdefault(decode_key(text), path)
        except ValueError as exc:
            yield Problem(path, f"{exc}; {_KEYGEN}")
        else:
            if first != path:
                yield Problem(path, f"is the same key as {first}; remove one of them")


def _replica(config: Config) -> Iterator[Problem]:
    replica = config.replica
    if replica.peers and replica.peers_dns:
        yield Problem("replica.peers_dns", "stands beside replica.peers; keep one of them")
    if (replica.peers or replica.peers_dns) and not config.state.keys:
        yield Problem("state.keys", f"is empty, and peers cannot open what an ephemeral key sealed; {_KEYGEN}")
    if replica.peers and replica.id is None:
        yield Problem("replica.id", "is missing beside replica.peers; write which of the peers this replica is")
    elif replica.peers and replica.id not in replica.peers:
        yield Problem("replica.peers", f'has no "{replica.id}", which is replica.id; list this replica too')
    if (replica.peers or replica.peers_dns) and replica.listen is None:
        yield Problem(
            "replica.listen", "is missing beside the peers; give the host:port at which they reach this replica"
        )


def _addresses(config: Config) -> Iterator[Problem]:
    taken: dict[str, str] = {"listen": config.listen}
    for path, address in (("admin", config.admin), ("replica.listen", config.replica.listen)):
        if address is None:
            continue
        for other, used in taken.items():
            if _collide(address, used):
                yield Problem(path, f"{address} is taken by {other} ({used}); choose another port")
        taken[path] = address
    if config.workers > 1 and split_address(config.listen)[1] == 0:
        yield Problem("listen", "picks a free port (0), and workers need one in common; write the port")


def _collide(one: str, other: str) -> bool:
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    return port == other_port != 0 and (host == other_host or bool({host, other_host} & _WILDCARDS))


def _principal(config: Config) -> Iterator[Problem]:
    principal = config.principal
    if principal.source == "authorization":
        if principal.header:
            yield Problem("principal.header", "is only read with principal.source: header; set that, or remove it")
        return
    if principal.header is None:
        yield Problem("principal.header", "is missing with principal.source: header; name the proxy's header")
    if not principal.trusted_proxies:
        yield Problem(
            "principal.trusted_proxies", "is empty, so anyone could set the header; list the proxy's network"
        )


def _routes(routes: tuple[Route, ...]) -> Iterator[Problem]:
    if not routes:
        yield Problem("routes", "is empty; add a route with path and upstream.url or upstream.command")
    first: dict[str, int] = {}
    for place, route in enumerate(routes):
        other = first.setdefault(route.path, place)
        if other != place:
            yield Problem(f"routes[{place}].path", f'"{route.path}" is also routes[{other}].path; change one')
        yield from _route(f"routes[{place}]", route)


def _route(path: str, route: Route) -> Iterator[Problem]:
    upstream = route.upstream
    if (upstream.url is None) == (upstream.command is None):
        count = "neither" if upstream.url is None else "both"
        yield Problem(f"{path}.upstream", f"has {count} of url and command; give exactly one")
    if upstream.url and upstream.transport == "stdio":
        yield Problem(f"{path}.upstream.transport", "stdio has no url; give upstream.command, or another transport")
    yield from _child(f"{path}.upstream", upstream)
    for name, times in Counter(route.forward_headers).items():
        if times > 1:
            yield Problem(f"{path}.forward_headers", f'lists "{name}" {times} times; keep one')


def _child(path: str, upstream: Upstream) -> Iterator[Problem]:
    if upstream.command is None:
        for key, value in (("env", upstream.env), ("cwd", upstream.cwd)):
            if value:
                yield Problem(f"{path}.{key}", "goes with upstream.command; remove it")
        return
    if upstream.transport not in {"auto", "stdio"}:
        yield Problem(f"{path}.transport", "is for a url; a command speaks stdio: write stdio or auto")
    if upstream.warm > upstream.max_children:
        yield Problem(f"{path}.warm", f"is more than max_children ({upstream.max_children}); lower it")
    for key, texts in (("command", upstream.command), ("env", upstream.env.values()), ("cwd", [upstream.cwd or ""])):
        if any("\0" in text for text in texts):
            yield Problem(f"{path}.{key}", "has a NUL character in it, which no process can be given; remove it")


_PER_ROUTE: tuple[tuple[str, Callable[[Route], bool], str], ...] = (
    (
        "upstream.transport",
        lambda route: route.upstream.transport == "sse",
        "is not supported in this version; write auto",
    ),
)


def _not_yet(config: Config) -> Iterator[Problem]:
    """Refuse what is declared but not built: a row leaves when its feature arrives."""
    for place, route in enumerate(config.routes):
        for path, uses_route, sentence in _PER_ROUTE:
            if uses_route(route):
                yield Problem(f"routes[{place}].{path}", sentence)
