"""Tells the principal of a request: from its token as it is, a trusted proxy's header, or a verified token."""

from gateway.auth.jwks import JwksVerifier
from gateway.config import Config, Contexts, InForce, contents
from gateway.http.incoming import Caller, Incoming
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_headers import AUTHORIZATION, check_once
from gateway.identity import principal as principals
from gateway.runtime.tasks import Tasks


class Authenticator:
    """Tells the principals of one listener's requests."""

    def __init__(self, config: Config, files: Contexts, client: Client, tasks: Tasks) -> None:
        self._client = client
        self._tasks = tasks
        self._verifier: JwksVerifier | None = None
        self._verifier_settings: object = None
        self.verifies: bool
        """Whether callers are authenticated here, by their headers alone."""
        self.knows_by_head: bool
        """Whether the head of a request tells its caller, wherever it comes from."""
        self.use(config, files)

    def use(self, config: Config, files: Contexts) -> None:
        """Identify callers as a configuration says, with what its files hold."""
        self._config = principal = config.principal
        # A reload that leaves these settings alone must keep the fetched keys and the verified tokens.
        settings = (principal, [digest for key, digest in contents(config).items() if key.startswith("principal.")])
        if settings != self._verifier_settings:
            self._verifier = None
            if principal.source == "jwt":
                bounds = Bounds(config.limits, config.timeouts, files.issuer)
                client = self._client.sibling(InForce(bounds))
                self._verifier = JwksVerifier(principal, files.issuer_keys, client, self._tasks)
        self._verifier_settings = settings
        self.verifies = self._verifier is not None
        self.knows_by_head = principal.source == "authorization"

    async def caller(self, incoming: Incoming, *, is_checked: bool) -> Caller:
        """Return the caller of a request, determined at the first call only.

        `is_checked`: the upstream sees the credential of the request, so it checks that credential. Raises
        Unauthorized or NoKeys if callers must be verified, and InvalidRequest for a repeated header.
        """
        if incoming.caller is not None:
            return incoming.caller
        headers, named = incoming.headers, self._config.header if self._config.source == "header" else None
        check_once((AUTHORIZATION, named), headers)
        if self._verifier is not None:
            caller = Caller(await self._verifier.principal(headers.get(AUTHORIZATION)), None)
        elif named is not None:
            is_trusted = principals.is_trusted(incoming.remote, self._config.trusted_proxies)
            principal = principals.of_header(headers.get(named) if is_trusted else None)
            caller = Caller(principal, None if is_trusted else named)
        else:
            principal = principals.of_authorization(headers.get(AUTHORIZATION), is_checked=is_checked)
            caller = Caller(principal, None)
        incoming.caller = caller
        return caller
