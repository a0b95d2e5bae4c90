"""Warnings about risky settings, logged at every start or reload."""

from collections.abc import Iterator

from gateway.config.model import Config
from gateway.config.parsing.formats import split_address
from gateway.config.rules import LOOPBACK

_OF_CONNECTIONS = {f"x-forwarded-{word}" for word in ("by", "for", "host", "port", "prefix", "proto", "server", "ssl")}


def _may_be_credential(name: str) -> bool:
    """Whether a header may carry a credential, as `x-forwarded-access-token` from some proxies does."""
    return name.startswith("x-forwarded-") and name not in _OF_CONNECTIONS


def cautions(config: Config) -> Iterator[str]:
    """Yield a warning for each risky setting, with the path of its key."""
    if config.debug.bodies:
        yield (
            "debug.bodies is true: the log contains what users typed and tools answered, and masks only what looks "
            "like a secret; set it to false when the fault is found"
        )
    local = split_address(config.listen)[0] in LOOPBACK
    for route in config.routes:
        path = f"routes[{route.path}]"
        if not route.upstream.tls.verify:
            yield (
                f"{path}.upstream.tls.verify is false: an attacker on the path can impersonate the upstream; "
                "give the upstream's CA in ca_file instead"
            )
        unbound = [name for name in route.forward_headers if _may_be_credential(name)]
        if unbound and route.bind_headers is None:
            yield (
                f"{path}.forward_headers has {', '.join(unbound)}, which requestStates are not bound to by default: "
                "set bind_headers, and list the header there if it is a credential"
            )
        if route.credentials.mode == "replace" and config.principal.source == "authorization" and not local:
            yield (
                f"{path}.credentials.mode is replace, but callers are not verified: every client that reaches "
                f"{config.listen} acts with the gateway's credential; set principal.source to jwt or header"
            )
