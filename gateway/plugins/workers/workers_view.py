"""Answers the supervisor's admin listener with the merged answers of its workers.

A counter must not go backwards when a worker ends, so its value at the last scrape stays in every later scrape. What
the worker counted after that scrape is lost; no scraper has seen it. For the same reason a worker that does not answer
in time counts with its previous values. Gauges include only the workers that answer.
"""

import asyncio
from http import HTTPStatus
from typing import Final

import aiohttp

from gateway.admin.probes import Probes
from gateway.admin.reload import Reload
from gateway.config import Config, InForce
from gateway.http.server.listener import UNIX
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, TextResponse
from gateway.plugins.status_page.pages import is_status, other_page, status_response, wants_json
from gateway.plugins.workers import merge_metrics
from gateway.telemetry import Metrics

_ANSWER_SECONDS: Final = 1.0
_STATUS_SECONDS: Final = 1.5
"""For a worker that asks the other replicas meanwhile, which have a second."""


class WorkerProcess:
    """One process of a worker, as its admin listener tells it; a restarted worker is a new process."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.counted: merge_metrics.Families = {}
        """Its counters and histograms at the last scrape."""

    async def get(self, path: str, seconds: float = _ANSWER_SECONDS) -> str | None:
        """Ask its admin listener; None unless it answers 200 in time."""
        connector = aiohttp.UnixConnector(self._address.removeprefix(UNIX))
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            # The host name is only for the Host header, where it passes as a name without a dot.
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
                http.get(f"http://worker{path}") as response,
            ):
                return await response.text() if response.status == HTTPStatus.OK else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def scraped(self, text: str | None) -> merge_metrics.Families:
        """Return what counts of it in a scrape: its answer, or its previous counters if it did not answer."""
        if text is None:
            return self.counted
        families = merge_metrics.parse(text)
        self.counted = merge_metrics.lasting(families)
        return families

    async def alive(self) -> "WorkerProcess | None":
        """Return this process if it answers in time."""
        return self if await self.get("/healthz") is not None else None


class Overview(Probes):
    """Answers for all workers."""

    def __init__(self, metrics: Metrics, in_force: InForce[Config], reload: Reload) -> None:
        super().__init__(in_force)
        self.proven: set[int] = set()
        """Workers that have been ready once."""
        self._metrics = metrics
        self._reload = reload
        self._processes: dict[int, WorkerProcess] = {}
        """Those that run now, by the number of their worker."""
        self._ended: merge_metrics.Families = {}
        self._turn = asyncio.Lock()

    def began(self, number: int, address: str) -> None:
        """A process of a worker was started, whose admin listener will be at this address."""
        self._processes[number] = WorkerProcess(address)

    def ended(self, number: int) -> None:
        """The process of a worker has ended; its counters stay."""
        self._ended = merge_metrics.merge((self._ended, self._processes.pop(number).counted))

    async def is_ready(self, number: int) -> bool:
        """Ask one worker."""
        process = self._processes.get(number)
        ready = process is not None and await process.get("/readyz") is not None
        if ready:
            # Whoever has asked: a worker that anybody was told is ready is restarted when it ends.
            self.proven.add(number)
        return ready

    async def unready(self) -> str | None:
        """See `Probes`: ready only if every worker is."""
        if self._reload.is_closed:
            return "draining"
        ready = await asyncio.gather(*map(self.is_ready, range(self._in_force.value.workers)))
        missing = [str(number) for number, is_ready in enumerate(ready) if not is_ready]
        return f"not ready: worker {', '.join(missing)}" if missing else None

    async def page(self, http: HttpRequest) -> Response | None:
        """See `Probes`: the worker that answers first tells the status of all workers and all replicas."""
        if not is_status(http):
            return other_page(http)
        path = f"{'/status.json' if wants_json(http) else '/status'}?{http.head.url.raw_query_string}"
        # Not the status of each: every worker that is asked for it asks all its siblings and all replicas.
        for answer in asyncio.as_completed([process.alive() for process in self._processes.values()]):
            if (first := await answer) is not None and (status := await first.get(path, _STATUS_SECONDS)) is not None:
                return status_response(http, status.encode())
        return TextResponse("no worker answers: the log says why (`worker.ended`)\n", 503)

    async def exposition(self) -> bytes:
        """See `Probes`: the sum over all workers and the supervisor itself."""
        # One scrape at a time: answers that overtake each other would make a counter go backwards.
        async with self._turn:
            asked = list(self._processes.values())
            answers = await asyncio.gather(*(process.get("/metrics") for process in asked))
            texts = dict(zip(asked, answers, strict=True))
            own = merge_metrics.parse(self._metrics.render().decode())
            # A process that ended during the scrape is not here: `_ended` has its previous counters.
            workers = [process.scraped(texts.get(process)) for process in self._processes.values()]
            return merge_metrics.write(merge_metrics.merge((own, self._ended, *workers))).encode()
