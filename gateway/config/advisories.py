"""What is allowed and should not go unnoticed: sentences for the log at every start and reload; pure."""

from collections.abc import Iterator

from gateway.config.model import Config
from gateway.config.parsing.formats import split_address
from gateway.config.rules import LOOPBACK

_OF_CONNECTIONS = {f"x-forwarded-{word}" for word in ("by", "for", "host", "port", "prefix", "proto", "server", "ssl")}


def _may_be_credential(name: str) -> bool:
    """Whether it is like `x-forwarded-access-token`, which some proxies set, and not about the connection."""
    return name.startswith("x-forwarded-") and name not in _OF_CONNECTIONS


def cautions(config: Config) -> Iterator[str]:
    """Yield them, each with the path of its key."""
    if config.debug.bodies:
        yield (
            "debug.bodies is true: the log has what people typed and tools answered, and only what looks like a "
            "secret is masked; set it to false when the fault is found"
        )
    local = split_address(config.listen)[0] in LOOPBACK
    for route in config.routes:
        path = f"routes[{route.path}]"
        if not route.upstream.tls.verify:
            yield (
                f"{path}.upstream.tls.verify is false: whoever is in between can be the upstream; "
                "give its authority in ca_file instead"
            )
        unbound = [name for name in route.forward_headers if _may_be_credential(name)]
        if unbound and route.bind_headers is None:
            yield (
                f"{path}.forward_headers has {', '.join(unbound)}, which no requestState is bound to by default: "
                "write bind_headers, with it if it is a credential"
            )
        if route.credentials.mode == "replace" and config.principal.source == "authorization" and not local:
            yield (
                f"{path}.credentials.mode is replace and nobody verifies the callers: who reaches {config.listen} "
                "acts with the gateway's credential; set principal.source to jwt or header"
            )
