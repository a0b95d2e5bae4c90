"""The state of one examination: its subject, its HTTP client, its findings so far."""

import re
import ssl
from collections.abc import Iterable
from typing import Final

from msgspec import Struct, structs
from yarl import URL

from gateway.children.child import given_secrets
from gateway.config import Config, Route
from gateway.http.upstream_client import Client
from gateway.http.upstream_url import Endpoint
from gateway.protocol.errors import clean
from gateway.runtime.own_ids import new_id
from gateway.runtime.tasks import Tasks
from gateway.telemetry.redaction import Secrets
from gateway.tools.probe.report.findings import Check, Server, State
from gateway.tools.probe.report.text import TextReport
from gateway.upstream.channel import Headers

_SCHEME: Final = re.compile(r"(?:bearer|basic) +(?P<token>\S+)", re.IGNORECASE)


class Subject(Struct, frozen=True, kw_only=True):
    """The server to examine, and how."""

    route: Route
    config: Config
    """With the overrides of this route."""
    headers: Headers
    """The headers that the gateway would send upstream."""
    tls: ssl.SSLContext | None = None
    """None: trust the system's authorities."""

    @property
    def secrets(self) -> list[str]:
        """Return what must not be printed."""
        upstream = self.route.upstream
        url = URL(upstream.url or "")
        return [*self.headers.values(), *given_secrets(upstream), url.raw_query_string, *url.query.values()]


class ProbeStopped(Exception):
    """The examination cannot go on."""


class Notes:
    """The checks, in order, safe to print; each is printed as soon as it is noted."""

    def __init__(self, secrets: Iterable[str], text: TextReport) -> None:
        """`secrets` are header values, tokens and so on, exactly as they are sent; the server may repeat them."""
        words = set(secrets)
        words |= {match["token"] for word in words if (match := _SCHEME.fullmatch(word)) is not None}
        self._secrets = Secrets(words, mask="<hidden>")
        self.checks: list[Check] = []
        self._text = text

    def ok(self, name: str, found: str, why: str = "", fix: str = "") -> None:
        """Record a passed check; `why` and `fix` hold a note, if there is one."""
        self._note(name, "ok", found, why, fix)

    def warn(self, name: str, found: str, why: str = "", fix: str = "") -> None:
        """Record something that works with a limit or a risk, which a feature explains if `why` does not."""
        self._note(name, "warning", found, why, fix)

    def failed(self, name: str, found: str, why: str, fix: str) -> ProbeStopped:
        """Record why the server cannot be used; the caller raises the result if it cannot go on."""
        self._note(name, "failed", found, why, fix)
        return ProbeStopped(found)

    def has_checked(self, name: str) -> bool:
        """Whether there is a check of this name."""
        return any(check.name == name for check in self.checks)

    def safe(self, text: str) -> str:
        """Return foreign text, safe to print: one line of bounded length, without secrets."""
        return self._secrets.masked(clean(text))

    def safe_server(self, server: Server) -> Server:
        """Return what a server says of itself, safe to print."""
        listed = {each: getattr(server, each) for each in ("versions", "capabilities", "left_out_tools")}
        safe = {name: tuple(map(self.safe, texts)) for name, texts in listed.items()}
        return structs.replace(server, name=self.safe(server.name), **safe)

    def _note(self, name: str, state: State, found: str, why: str, fix: str) -> None:
        found, why, fix = map(self.safe, (found, why, fix))
        self.checks.append(Check(name=name, state=state, found=found, why=why, fix=fix))
        self._text.check(self.checks[-1])


class ProbeContext:
    """One server: how to talk to it, and what is known about it."""

    def __init__(self, subject: Subject, client: Client, tasks: Tasks, text: TextReport) -> None:
        self.notes = Notes(subject.secrets, text)
        self.subject = subject
        self.timeouts = subject.config.timeouts
        self.client = client
        self.tasks = tasks
        # Errors do not repeat the URL, whose query may be secret: the report begins with it.
        self.endpoint = Endpoint(subject.route.upstream.url or "", where="The server")
        self.server = Server()
        self.discover_id = new_id()
        """Of the request `server/discover`."""
        self.met_page = False
        """Whether the first answer was a web page, as some frameworks send for an unknown path."""

    def learn(self, **facts: object) -> None:
        """Note properties of the server."""
        self.server = structs.replace(self.server, **facts)
