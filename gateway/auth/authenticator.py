"""Who is calling, by configuration: a token as it is, a trusted proxy's header, or a verified token."""

import ipaddress

from gateway.auth.jwks import JwksVerifier
from gateway.config import Config, ConfigError, contents, jwks_context
from gateway.http.client import Client
from gateway.http.forwarded_headers import AUTHORIZATION, check_once
from gateway.http.incoming import Incoming
from gateway.identity import principal as principals
from gateway.runtime.tasks import Tasks


class Authenticator:
    """The principals of one listener's requests."""

    def __init__(self, config: Config, client: Client, tasks: Tasks) -> None:
        """Raises ConfigError where the issuer's files cannot be used."""
        self._client = client
        self._tasks = tasks
        self._issuer: JwksVerifier | None = None
        self._made_of: object = None
        self.change(config)

    def change(self, config: Config) -> None:
        """Tell new requests' callers by this configuration; raises ConfigError, with nothing changed."""
        principal = config.principal
        # A reload of something else must not forget keys and tokens.
        made_of = (principal, [digest for key, digest in contents(config).items() if key.startswith("principal.")])
        if made_of != self._made_of:
            self._issuer = self._new_issuer(config) if principal.source == "jwt" else None
        self._made_of = made_of
        self._config = principal
        self._networks = [ipaddress.ip_network(network) for network in principal.trusted_proxies]

    def _new_issuer(self, config: Config) -> JwksVerifier:
        client = self._client.sibling(config.limits, config.timeouts)
        client.change(config.limits, config.timeouts, jwks_context(config.principal))
        try:
            return JwksVerifier(config.principal, client, self._tasks)
        except (OSError, ValueError) as exc:
            raise ConfigError((f"principal.jwks_file: {exc}",)) from exc

    @property
    def verifies(self) -> bool:
        """Whether a caller is turned away here, by its headers alone."""
        return self._issuer is not None

    async def principal(self, incoming: Incoming, *, is_checked: bool) -> bytes:
        """Return the caller of a request, determined at the first call only.

        `is_checked`: the upstream sees the credential of the request, so it checks that credential. Raises
        Unauthorized or NoKeys if callers must be verified, and InvalidRequest for a repeated header.
        """
        if incoming.principal is None:
            incoming.principal = await self._determine(incoming, is_checked=is_checked)
        return incoming.principal

    async def _determine(self, incoming: Incoming, *, is_checked: bool) -> bytes:
        config = self._config
        check_once((AUTHORIZATION, config.header), incoming.headers)
        authorization = incoming.headers.get(AUTHORIZATION)
        if self._issuer is not None:
            return await self._issuer.caller(authorization)
        if config.source == "header" and config.header is not None:
            is_believed = self.disbelieved(incoming) is None
            return principals.of_header(incoming.headers.get(config.header) if is_believed else None)
        return principals.of_authorization(authorization, is_checked=is_checked)

    def disbelieved(self, incoming: Incoming) -> str | None:
        """Return the header that names the principal, unless this request came from a proxy that may set it."""
        if self._config.source != "header" or principals.is_trusted(incoming.remote, self._networks):
            return None
        return self._config.header
