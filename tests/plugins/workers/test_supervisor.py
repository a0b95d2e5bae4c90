"""The supervisor, where a real worker would have to be unlucky: first starts that fail, and folders for sockets."""

import asyncio
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from gateway.cluster.worker import Worker
from gateway.config import Config, Hold, Route, State, Timeouts, Upstream
from gateway.plugins.workers import supervisor
from tests.parts.launch import free_port
from tests.support import broken_workers
from tests.support.logs import Lines


def config() -> Config:
    return Config(
        listen=f"127.0.0.1:{free_port()}",
        admin=None,
        workers=2,
        state=State(keys=("0f" * 32,)),
        hold=Hold(drain_delay_seconds=0, drain_seconds=0),
        timeouts=Timeouts(cancel_seconds=0.1),
        routes=(Route(upstream=Upstream(url="http://127.0.0.1:1/mcp")),),
    )


@pytest.mark.processes
async def test_a_worker_that_cannot_listen_says_why_and_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_work", broken_workers.one_cannot_listen)
    async with asyncio.timeout(60):
        assert await supervisor.supervise(config()) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "server.failed" in line]
    assert "cannot listen at unix:" in line
    assert not multiprocessing.active_children()
    assert len(log_lines("worker.started")) == 2, "nobody was started again"


@pytest.mark.processes
async def test_a_worker_that_crashes_at_its_first_start_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines
) -> None:
    monkeypatch.setattr(supervisor, "_work", broken_workers.one_crashes)
    async with asyncio.timeout(60):
        assert await supervisor.supervise(config()) == 1
    assert not multiprocessing.active_children()
    (line,) = log_lines("worker.ended")
    assert (line["worker"], line["exit_code"], line["level"]) == (broken_workers.BROKEN, broken_workers.CODE, "error")
    assert len(log_lines("worker.started")) == 2


@pytest.mark.processes
async def test_a_worker_that_hangs_does_not_keep_the_program_alive(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines
) -> None:
    monkeypatch.setattr(supervisor, "_work", broken_workers.one_crashes_and_the_other_hangs)
    monkeypatch.setattr(supervisor, "AFTER_SECONDS", 0.1)
    async with asyncio.timeout(60):
        assert await supervisor.supervise(config()) == 1
    assert not multiprocessing.active_children()
    assert [line["worker"] for line in log_lines("worker.ended")] == [broken_workers.BROKEN, 0]


@pytest.mark.processes
async def test_a_supervisor_that_falls_to_a_bug_takes_its_workers_with_it(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines
) -> None:
    monkeypatch.setattr(supervisor, "_work", broken_workers.one_crashes_and_the_other_hangs)

    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(supervisor.Overview, "ended", bug)
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            _ = await supervisor.supervise(config())
    assert len(log_lines("worker.started")) == 2
    for line in log_lines("worker.started"):
        with pytest.raises(ProcessLookupError):
            os.kill(line["pid"], 0)


def test_signals_are_blocked_only_while_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[set[signal.Signals | int]] = []
    process = Mock(pid=1)
    process.start.side_effect = lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", Mock(return_value=process))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    _ = supervisor._Life(config(), Worker(0, 1, "", b""), None)
    assert masks[0] >= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


# The folder of the sockets.


def longest(directory: str, count: int) -> int:
    return len(os.fsencode(Worker(count - 1, count, directory, b"").socket("admin").removeprefix("unix:")))


@pytest.mark.parametrize(("length", "taken"), [(107, True), (108, False)])
def test_a_folder_too_long_for_socket_paths_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, *, taken: bool
) -> None:
    rest = length - longest(f"{tmp_path}//mrtr-12345678", 100)
    folder = tmp_path / ("x" * rest)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with supervisor._private_directory(100) as made:
        assert Path(made).is_relative_to(folder) is taken
        assert Path(made).stat().st_mode & 0o777 == 0o700
        assert longest(made, 100) <= 107
    assert not list(folder.iterdir())


def test_without_any_folder_the_words_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(OSError, match="/dev/shm"):
        _ = supervisor._private_directory(2)
