"""Tells the principal of a request: from its token as it is, a trusted proxy's header, or a verified token."""

import ipaddress

from gateway.auth.jwks import JwksVerifier
from gateway.config import Config, ConfigError, contents, jwks_context
from gateway.http.client import Client
from gateway.http.forwarded_headers import AUTHORIZATION, check_once
from gateway.http.reply import Incoming
from gateway.identity import principal as principals
from gateway.runtime.tasks import Tasks


class Authenticator:
    """Tells the principals of one listener's requests."""

    def __init__(self, config: Config, client: Client, tasks: Tasks) -> None:
        """Raises ConfigError if the issuer's files cannot be used."""
        self._client = client
        self._tasks = tasks
        self._verifier: JwksVerifier | None = None
        self._verifier_settings: object = None
        self.change(config)

    def change(self, config: Config) -> None:
        """Use this configuration for new requests; raises ConfigError, with nothing changed."""
        principal = config.principal
        # A reload that leaves these settings alone must keep the fetched keys and the verified tokens.
        settings = (principal, [digest for key, digest in contents(config).items() if key.startswith("principal.")])
        if settings != self._verifier_settings:
            self._verifier = self._new_verifier(config) if principal.source == "jwt" else None
        self._verifier_settings = settings
        self._config = principal
        self._networks = [ipaddress.ip_network(network) for network in principal.trusted_proxies]

    def _new_verifier(self, config: Config) -> JwksVerifier:
        client = self._client.sibling(config.limits, config.timeouts)
        client.change(config.limits, config.timeouts, jwks_context(config.principal))
        try:
            return JwksVerifier(config.principal, client, self._tasks)
        except (OSError, ValueError) as exc:
            raise ConfigError((f"principal.jwks_file: {exc}",)) from exc

    @property
    def verifies(self) -> bool:
        """Whether callers are authenticated here, by their headers alone."""
        return self._verifier is not None

    async def principal(self, incoming: Incoming, *, is_checked: bool) -> bytes:
        """The principal of one request; `is_checked` if the upstream gets and checks its credential.

        Raises Unauthorized or NoKeys if callers are verified here, and InvalidRequest for a repeated header.
        """
        config = self._config
        check_once((AUTHORIZATION, config.header), incoming.headers)
        authorization = incoming.headers.get(AUTHORIZATION)
        if self._verifier is not None:
            return await self._verifier.principal(authorization)
        if config.source == "header" and config.header is not None:
            is_trusted = self.disbelieved(incoming) is None
            return principals.of_header(incoming.headers.get(config.header) if is_trusted else None)
        return principals.of_authorization(authorization, is_checked=is_checked)

    def disbelieved(self, incoming: Incoming) -> str | None:
        """The header that names the principal, if this request does not come from a trusted proxy; else None."""
        if self._config.source != "header" or principals.is_trusted(incoming.remote, self._networks):
            return None
        return self._config.header
