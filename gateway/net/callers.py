"""Who is calling, by configuration: a token as it is, a trusted proxy's header, or a verified token."""

import ipaddress

from gateway import principal as principals
from gateway.config import Config
from gateway.net.wire import Incoming


class Callers:
    """The principals of one listener's requests."""

    def __init__(self, config: Config) -> None:
        self.change(config)

    def change(self, config: Config) -> None:
        """Tell new requests' callers by this configuration."""
        self._config = config.principal
        self._networks = [ipaddress.ip_network(network) for network in config.principal.trusted_proxies]

    async def principal(self, incoming: Incoming, *, is_checked: bool) -> bytes:
        """The caller of one request; `is_checked`: the upstream sees and checks its credential."""
        config = self._config
        if config.source == "header" and config.header is not None:
            is_trusted = principals.is_trusted(incoming.remote, self._networks)
            return principals.of_header(incoming.headers.get(config.header) if is_trusted else None)
        return principals.of_authorization(incoming.headers.get("Authorization"), is_checked=is_checked)
