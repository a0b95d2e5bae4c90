"""Reloads the configuration file on SIGHUP, completely or not at all."""

import asyncio
from typing import Protocol

from gateway.config import RESTART, Config, ConfigError, ConfigFile, InForce, Problem, changes, contents, digest
from gateway.config.load import lines, placed
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Event, get_logger

log = get_logger()


class Reloadable(Protocol):
    """A process that can go on with another configuration."""

    def apply(self, config: Config) -> None:
        """Serve by this configuration; raises ConfigError, with nothing changed."""

    def reloaded(self, *, applied: bool) -> None:
        """A reload is over."""


class Reload:
    """The reloads of one process, one at a time."""

    def __init__(
        self,
        file: ConfigFile | None,
        in_force: InForce[Config],
        owner: Reloadable,
        tasks: Tasks,
        **name: str,
    ) -> None:
        """Give `file` None if the process has no file; `name` is logged."""
        self.rejected: tuple[str, ...] | None = None
        """The problems of the file, if the last reload rejected it."""
        self.needs_restart = False
        """Whether it was rejected because of keys that cannot change while the process runs, and of nothing else."""
        self._file = file
        self._in_force = in_force
        self._contents = contents(in_force.value)
        self._owner = owner
        self._tasks = tasks
        self._name = name
        self._begun, self._turn = asyncio.Event(), asyncio.Lock()
        self.is_closed = False
        """Whether the process is to end."""

    @property
    def is_open(self) -> bool:
        """Whether the process has started, and its settings may change."""
        return self._begun.is_set() and not self.is_closed

    def close(self) -> None:
        """The process is to end: its settings do not change any more."""
        self.is_closed = True

    def begin(self) -> None:
        """The process has started: run the reloads that were asked for meanwhile."""
        self._begun.set()

    def ask(self) -> None:
        """Reload, after the reloads that were asked for before."""
        if self.is_closed:
            note = "a reload in mid-drain is ignored: the process is ending"
            log.warning(Event.CONFIG_REJECTED, note=note, **self._name)
            return
        self._tasks.spawn(self._work(), "reload")

    async def _work(self) -> None:
        _ = await self._begun.wait()
        async with self._turn:
            try:
                applied = await self._once()
            except Exception:  # a bug counts as well, and a supervisor signals its workers all the same
                self._owner.reloaded(applied=False)
                raise
            if applied is not None:
                self._owner.reloaded(applied=applied)

    async def _once(self) -> bool | None:
        """Read and apply the file; return whether it was applied, or None if the process is ending."""
        if self._file is None:
            note = "SIGHUP reads the file of --config again, and this process has none: nothing changes"
            log.warning(Event.CONFIG_REJECTED, note=note, **self._name)
            return False
        try:
            # In a thread, because a long file would delay calls.
            new = await asyncio.to_thread(self._file.load)
            files = await asyncio.to_thread(contents, new)
            found = changes(self._in_force.value, new)
            why = "cannot change while the process runs; restart, or put the old value back"
            if stuck := [Problem(key, why) for key in found if key in RESTART]:
                stuck = await asyncio.to_thread(placed, self._file.path, stuck)
            if self.is_closed:
                return None  # the drain has begun meanwhile, and relies on the present keys
            if stuck:
                return self._reject(ConfigError(stuck, str(self._file.path)), needs_restart=True)
            self._owner.apply(new)
        except ConfigError as exc:  # of the file, or of one that was removed since it was read
            return self._reject(exc)
        changed = [*found]
        changed += [
            f"{key} (content)"
            for key, content in files.items()
            if key not in changed and self._contents.get(key, content) != content
        ]
        self._contents, self.rejected = files, None
        note = "reloaded" if changed else "nothing changed"
        log.info(Event.CONFIG_LOADED, note=note, configuration=digest(new), changed=changed, **self._name)
        return True

    def _reject(self, error: ConfigError, *, needs_restart: bool = False) -> bool:
        self.rejected = problems = tuple(lines(error.found, error.source))
        self.needs_restart = needs_restart
        note = "the configuration stays as it was"
        log.error(Event.CONFIG_REJECTED, problems=problems, note=note, **self._name)
        return False
