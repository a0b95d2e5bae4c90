"""One server under examination: what is asked of it and how, and what was found so far."""

import ssl

from msgspec import Struct

from gateway.config import Config, Route, Timeouts
from gateway.net.client import Client, Endpoint
from gateway.net.tasks import Tasks
from gateway.net.upstream import Headers
from gateway.probe.findings import Check, Server, State


class Subject(Struct, frozen=True, kw_only=True):
    """What is to be examined."""

    route: Route
    config: Config
    """As it holds on this route."""
    headers: Headers
    """What a client of the gateway would have sent upstream."""
    tls: ssl.SSLContext | None = None
    """None: the system's authorities."""
    wait_seconds: float = 0.0
    """How long the idle side stream is listened to."""


class Stopped(Exception):
    """Nothing that would come next can be looked at."""


class Notes:
    """Checks, in the order in which they were made."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def ok(self, name: str, found: str, why: str = "", fix: str = "") -> None:
        """Note what is as it should be; `why` and `fix` where something is to be known of it all the same."""
        self._note(name, "ok", found, why, fix)

    def warn(self, name: str, found: str, why: str, fix: str) -> None:
        """Note what works with a limit or a risk."""
        self._note(name, "warning", found, why, fix)

    def failed(self, name: str, found: str, why: str, fix: str) -> Stopped:
        """Note why it cannot be used; to be raised where nothing can come next."""
        self._note(name, "failed", found, why, fix)
        return Stopped(found)

    def _note(self, name: str, state: State, found: str, why: str, fix: str) -> None:
        self.checks.append(Check(name=name, state=state, found=found, why=why, fix=fix))


class Examination(Notes):
    """One server: how it is spoken to, and what it was found to be."""

    def __init__(self, subject: Subject, client: Client, tasks: Tasks) -> None:
        super().__init__()
        self.subject = subject
        self.client = client
        self.tasks = tasks
        route = subject.route
        self.endpoint = Endpoint(route.path, route.upstream.url or "")
        # What errors call it: the URL stands at the head of the report, and its query may be secret.
        self.endpoint.where = "The server"
        self.server = Server()
        self.met_page = False
        """Whether the first answer was a web page; some frameworks answer with one what they do not serve."""
        self.spoken = False
        """Whether the server was spoken to, so that its features can be told."""
        self.needs_sse = False
        """Whether it is HTTP+SSE, and `transport: auto` would not have found that."""

    @property
    def timeouts(self) -> Timeouts:
        """How long each step may take."""
        return self.subject.config.timeouts
