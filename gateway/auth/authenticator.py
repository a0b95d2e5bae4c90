"""Tells the principal of a request: from its token as it is, a trusted proxy's header, or a verified token."""

import ipaddress
from collections.abc import Callable
from typing import Final

from gateway.auth.jwks import JwksVerifier
from gateway.config import Config, ConfigError, InForce, Problem, contents, jwks_context
from gateway.http.incoming import Caller, Incoming
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_headers import AUTHORIZATION, check_once
from gateway.identity import principal as principals
from gateway.runtime.tasks import Tasks

_ANONYMOUS: Final = Caller(principals.ANONYMOUS, None)


class Authenticator:
    """Tells the principals of one listener's requests."""

    def __init__(self, in_force: InForce[Config], client: Client, tasks: Tasks) -> None:
        """Raises ConfigError if a file of the issuer cannot be used, as a later replacement of the value does."""
        self._client = client
        self._tasks = tasks
        self._verifier: JwksVerifier | None = None
        self._verifier_settings: object = None
        self.verifies: bool
        """Whether callers are authenticated here, by their headers alone."""
        self.knows_by_head: bool
        """Whether the head of a request tells its caller, wherever it comes from."""
        self._prepare(in_force.value)()
        in_force.before_replace(self._prepare)

    def _prepare(self, config: Config) -> Callable[[], None]:
        """Read the issuer's files; return the function that takes the configuration over."""
        principal = config.principal
        # A reload that leaves these settings alone must keep the fetched keys and the verified tokens.
        settings = (principal, [digest for key, digest in contents(config).items() if key.startswith("principal.")])
        verifier = self._verifier
        if settings != self._verifier_settings:
            verifier = self._new_verifier(config) if principal.source == "jwt" else None

        def take_over() -> None:
            self._verifier, self._verifier_settings, self._config = verifier, settings, principal
            self.verifies = verifier is not None
            self._networks = [ipaddress.ip_network(network) for network in principal.trusted_proxies]
            self.knows_by_head = principal.source == "authorization"

        return take_over

    def _new_verifier(self, config: Config) -> JwksVerifier:
        client = self._client.sibling(InForce(Bounds(config.limits, config.timeouts, jwks_context(config.principal))))
        try:
            return JwksVerifier(config.principal, client, self._tasks)
        except (OSError, ValueError) as exc:
            raise ConfigError([Problem("principal.jwks_file", str(exc))]) from exc

    async def caller(self, incoming: Incoming, *, is_checked: bool) -> Caller:
        """Return the caller of a request, determined at the first call only.

        `is_checked`: the upstream sees the credential of the request, so it checks that credential. Raises
        Unauthorized or NoKeys if callers must be verified, and InvalidRequest for a repeated header.
        """
        if incoming.caller is None:
            verified = None
            if self._verifier is not None:
                check_once((AUTHORIZATION,), incoming.headers)
                verified = await self._verifier.principal(incoming.headers.get(AUTHORIZATION))
            incoming.caller = self._caller(incoming, verified, is_checked=is_checked)
        return incoming.caller

    def _caller(self, incoming: Incoming, verified: bytes | None, *, is_checked: bool) -> Caller:
        headers, named = incoming.headers, self._config.header if self._config.source == "header" else None
        if AUTHORIZATION not in headers and not (named or verified):
            return _ANONYMOUS
        check_once((AUTHORIZATION, named), headers)
        if verified is not None:
            return Caller(verified, None)
        if named is None:
            authorization = headers.get(AUTHORIZATION)
            return Caller(principals.of_authorization(authorization, is_checked=is_checked), None)
        is_trusted = principals.is_trusted(incoming.remote, self._networks)
        principal = principals.of_header(headers.get(named) if is_trusted else None)
        return Caller(principal, None if is_trusted else named)
