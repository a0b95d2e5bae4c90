"""The path of a new user in a fresh clone: `make demo`, an install, the quick start, a probe, a modern client.

The steps of the path that follow are shown elsewhere, each with more than one gateway: ELSEWHERE.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import Block, blocks
from tests.docs.shell import Reader
from tests.parts.clients.drive import Kind, elicit, modern_client
from tests.parts.launch import REPOSITORY, old_server, output_of
from tests.support.gateway_process import gateway
from tests.support.programs import output

ELSEWHERE: Final = {
    "tests/e2e/test_container.py": "test_a_modern_client_answers_a_question_of_a_legacy_server",
    "tests/deploy/test_docker.py": "test_an_update_of_the_compose_story_refuses_no_call_and_loses_none",
    "tests/chaos/test_updates.py": "test_an_update_refuses_no_new_call_and_loses_none",
}
"""The test of each step by its file: the image, Compose with an update under load, an update without containers."""
QUICK_START: Final = blocks(REPOSITORY / "docs" / "quick-start.md")
CLIENTS: Final[tuple[Kind, ...]] = ("py", "ts")
SECONDS: Final = 300

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(not all(map(shutil.which, ("git", "make", "curl"))), reason="apt install git make curl"),
]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command of the path, which must succeed, and return what it prints."""
    # The environment of a new user: nothing of this run's own virtual environment, and no settings.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GATEWAY_", "MRTR_", "VIRTUAL"))}
    return output(*command, cwd=cwd, env=kept | environment, stdin=subprocess.DEVNULL, timeout=SECONDS)


def followed(block: Block) -> bool:
    """Whether a reader follows the block; the install is a step of its own here."""
    return block.run_by is None and not block.said.startswith("not run")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new-user")
    _ = run("git", "clone", "--quiet", REPOSITORY, "gateway", cwd=folder)
    return folder / "gateway"


@pytest.fixture(scope="module")
def programs(clone: Path) -> Path:
    """The programs of a new virtual environment, into which the clone was installed as the quick start says."""
    (install,) = (block.text for block in QUICK_START if block.run_by == "tests/e2e/test_new_user.py")
    venv = clone.parent / "venv"
    _ = run(sys.executable, "-m", "venv", venv, cwd=clone)
    path = os.pathsep.join([str(venv / "bin"), os.environ["PATH"]])
    _ = run("bash", "-euc", install, cwd=clone, PATH=path, PIP_QUIET="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return venv / "bin"


def test_make_demo_answers_a_question_in_a_fresh_clone(clone: Path) -> None:
    printed = run("make", "demo", f"PYTHON={sys.executable}", cwd=clone)
    assert "Bug #4522 resolved as Duplicate of Bug #4301." in printed


def test_the_installed_program_follows_the_quick_start(programs: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path, 0, programs)
    try:
        reader.follow([block for block in QUICK_START if followed(block)])
        reader.leave()
    finally:
        reader.kill()


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_modern_client_answers_a_question_through_the_installed_program(kind: Kind, programs: Path) -> None:
    environment = {"GATEWAY_LOG__FORMAT": "json", "GATEWAY_HOLD__DRAIN_DELAY_SECONDS": "0"}
    async with (
        old_server("everything") as server,
        gateway(server.url, program=programs / "mrtr-gateway", environment=environment) as gw,
        modern_client(kind) as client,
    ):
        connected = await client.connect(gw.url)
        assert connected.value["protocolVersion"] == "2026-07-28"
        answer = elicit({"action": "accept", "content": {"name": "Ada", "check": True}})
        called = await client.call_tool("trigger-elicitation-request", answers=[answer])
        assert "Ada" in str(called.value["content"])


async def test_the_probe_reports_on_the_server_of_the_quick_start(programs: Path, tmp_path: Path) -> None:
    async with old_server("everything") as server:
        printed = await output_of(programs / "mrtr-gateway", "probe", server.url, cwd=tmp_path)
    assert "questions: yes" in printed


@pytest.mark.parametrize("file", ELSEWHERE)
def test_the_other_steps_of_the_path_have_tests_of_their_own(file: str) -> None:
    assert f"def {ELSEWHERE[file]}(" in (REPOSITORY / file).read_text()
