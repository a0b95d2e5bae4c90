"""The shipped image between a real legacy server and real modern clients, run by podman without privileges."""

import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from packaging.utils import canonicalize_name

from tests.deploy.test_image import locked
from tests.deploy.test_monitoring import concrete, queries
from tests.e2e.cases import ANN, Drivers
from tests.e2e.wire import ACCEPT, NAMED, wire
from tests.parts.clients.drive import elicit
from tests.parts.launch import OldServer, free_port, old_server
from tests.support import compose
from tests.support.container import (
    AGAIN,
    HARDENED,
    IMAGE,
    Container,
    build,
    build_again,
    container,
    inspected,
    installed,
    leave,
    limits,
    podman,
    podman_command,
)
from tests.support.gateway_process import HELD
from tests.support.programs import output, verdict
from tests.support.prometheus import installed as prometheus_installed
from tests.support.prometheus import prometheus

USER: Final = "65532"
KEY: Final = "0f" * 32
NO_RIGHTS: Final = "0" * 16
STOP_SECONDS: Final = 45
SBOM: Final = "/opt/mrtr-gateway/share/sbom/mrtr-gateway.cdx.json"
STRICT: Final = (*HARDENED, "--security-opt=no-new-privileges:true")

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),  # the first test waits for the build
    pytest.mark.skipif(not installed(), reason="apt install buildah podman runc mmdebstrap, and run as root"),
]


@pytest.fixture(scope="module")
def image() -> Iterator[None]:
    build()
    yield
    leave()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[OldServer]:
    async with old_server("py130") as found:
        yield found


def addresses() -> dict[str, Any]:
    """Where a container that has the host's network may listen."""
    return {"listen": f"127.0.0.1:{free_port()}", "admin": f"127.0.0.1:{free_port()}", "routes": [{"path": "/mcp"}]}


def given(config: dict[str, Any], server: OldServer) -> list[str]:
    """The environment of a container that uses the image's own configuration."""
    variables = {
        "MRTR_UPSTREAM": server.url,
        "GATEWAY_LISTEN": config["listen"],
        "GATEWAY_ADMIN": config["admin"],
        "GATEWAY_LOG__FORMAT": "json",
        "GATEWAY_HOLD__DRAIN_DELAY_SECONDS": "0",
    }
    return [f"--env={name}={value}" for name, value in variables.items()]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def box(image: None, server: OldServer) -> AsyncIterator[Container]:
    config = addresses()
    async with container("main", config, *STRICT, *given(config, server)) as found:
        yield found


def once(*options: str, command: Sequence[str] = ()) -> tuple[int, str]:
    """Run a container to its end; return its exit code and output."""
    return verdict(*podman_command("run", "--rm", "--network=host", *limits(), *options, IMAGE, *command))


def status(box: Container) -> dict[str, str]:
    """The kernel's status of the first process in the container."""
    pid = inspected(box.name)["State"]["Pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("kind", ["ts", "py"])
async def test_a_modern_client_answers_a_question_of_a_legacy_server(
    kind: Any, box: Container, server: OldServer, drivers: Drivers
) -> None:
    before = len(server.ledger("finished", "ask"))
    client = await drivers.connect(kind, box.url)
    answers = [elicit({"action": "accept", "content": {"name": "Ann"}})]
    reply = await client.call_tool("ask", {"question": "Who?"}, answers=answers)
    assert (reply.text, reply.kinds) == (ANN, ["elicit"])
    assert len(server.ledger("finished", "ask")) == before + 1
    await box.settled()


async def test_the_container_is_scraped_and_healthy(box: Container) -> None:
    assert await box.metric("mcp_gateway_build_info") == 1
    assert box.is_healthy()


@pytest.mark.skipif(not prometheus_installed(), reason="apt install prometheus")
async def test_a_published_server_works_with_a_container_and_a_prometheus(image: None, drivers: Drivers) -> None:
    """A platform team's first hour: server-everything, the image, a question, a scrape, the dashboard's queries."""
    async with old_server("everything") as server, AsyncExitStack() as stack:
        config = addresses()
        box = await stack.enter_async_context(container("everything", config, *STRICT, *given(config, server)))
        found = await stack.enter_async_context(prometheus([box.config["admin"]]))
        client = await drivers.connect("ts", box.url)
        answers = [elicit({"action": "accept", "content": {"name": "Ann"}})]
        reply = await client.call_tool("trigger-elicitation-request", {}, answers=answers)
        assert reply.kinds == ["elicit"]
        assert "Ann" in str(reply.value["content"])

        async def scraped() -> bool:
            rounds = (
                'mcp_server_operation_duration_seconds_count{method="tools/call", outcome=~"input_required|complete"}'
            )
            found_now = await found.query(f"sum({rounds})")
            return bool(found_now) and float(found_now[0]["value"][1]) == 2

        await found.until(scraped, "both rounds of the call are in Prometheus")
        for _, expression in queries():
            await found.query(await concrete(found, expression))  # raises without an answer
        assert not await found.query('ALERTS{alertstate="firing"}')


async def test_the_container_runs_unprivileged_and_writes_nothing(box: Container) -> None:
    found = status(box)
    assert {*found["Uid"].split(), *found["Gid"].split()} == {USER}
    assert {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {NO_RIGHTS}
    assert found["NoNewPrivs"] == "1"
    assert found["NSpid"].split()[-1] == "1", "nothing stands between the engine's signals and the gateway"
    assert podman("diff", box.name).splitlines() == ["C /etc"], "podman's own places for hosts and resolv.conf"


async def test_sigterm_lets_a_user_finish_and_exits_with_0(image: None, server: OldServer) -> None:
    config = addresses()
    async with container("drain", config, *STRICT, *given(config, server)) as box, wire(box.url) as client:
        asked = await client.call("ask", {"question": "Who?"})
        podman("kill", "--signal", "TERM", box.name)  # `podman stop` would have podman refuse the health check
        await box.until_logged("server.draining")
        assert await box.ready() == 503
        assert box.is_healthy(), "a container that is killed for draining loses its calls"
        assert await box.metric(HELD) == 1
        assert (await client.answer(asked, ACCEPT)).text == NAMED
        assert await box.exited(STOP_SECONDS) == 0
        assert inspected(box.name)["State"]["ExitCode"] == 0


async def test_a_container_whose_gateway_does_not_answer_is_not_healthy(image: None, server: OldServer) -> None:
    config = addresses()
    async with container("frozen", config, *STRICT, *given(config, server), "--env=GATEWAY_WORKERS=2") as box:
        assert box.is_healthy(), "two workers find a folder for their sockets"
        pid = inspected(box.name)["State"]["Pid"]  # from inside the container, process 1 cannot be stopped
        os.kill(pid, signal.SIGSTOP)
        assert not box.is_healthy()
        os.kill(pid, signal.SIGCONT)
        podman("stop", "--time", str(STOP_SECONDS), box.name)
        assert await box.exited() == 0


async def test_the_container_without_an_upstream_names_the_missing_variable(image: None) -> None:
    code, said = once(*STRICT)
    assert code == 1
    assert "routes[0].upstream.url: ${MRTR_UPSTREAM} is not set; export MRTR_UPSTREAM" in said


async def test_the_image_can_trace(image: None) -> None:
    asked = ["--env=MRTR_UPSTREAM=http://127.0.0.1:9/mcp", "--env=GATEWAY_TRACES=true"]
    code, said = once(*STRICT, *asked, command=["check", "--config", "/etc/mrtr-gateway/config.yaml"])
    assert code == 0, said
    assert "traces" not in said, "no note says that a package is missing"


async def test_the_image_has_labels(image: None) -> None:
    found = inspected(IMAGE)
    assert found["User"] == f"{USER}:{USER}"
    assert found["Config"]["Entrypoint"] == ["mrtr-gateway"]
    assert found["Config"]["Cmd"] == ["serve", "--config", "/etc/mrtr-gateway/config.yaml"]
    assert found["Config"]["StopSignal"] in {"SIGTERM", "15"}
    labels = found["Labels"]
    assert labels["org.opencontainers.image.revision"] == output("git", "rev-parse", "HEAD").strip()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.created"].endswith("Z")
    history = podman("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE)
    assert "index-url" not in history


async def test_two_builds_of_the_image_have_the_same_layers(image: None) -> None:
    """Their descriptions differ: in Docker's format they name the container that built the image."""
    build_again()
    assert inspected(IMAGE)["RootFS"] == inspected(AGAIN)["RootFS"]


async def test_the_list_of_parts_equals_the_content(image: None) -> None:
    code, said = once("--entrypoint=cat", command=[SBOM])
    assert code == 0, said
    parts = json.loads(said)
    found = {canonicalize_name(part["name"]): part["version"] for part in parts["components"]}
    version = found.pop("mrtr-gateway")
    expected = {name: version for name, (version, _) in locked("requirements").items()}
    assert found == expected
    assert version == inspected(IMAGE)["Labels"]["org.opencontainers.image.version"]


# --- what deploy/compose says, with the host's network ---


async def test_compose_starts_one_gateway_with_its_key_in_a_file(
    image: None, server: OldServer, tmp_path: Path
) -> None:
    folder = tmp_path / "gateway"
    folder.mkdir()
    for name in ("compose.yaml", "config.yaml"):
        (folder / name).write_text((compose.FOLDERS["gateway"] / name).read_text())
    (folder / "state_keys").write_text(f"{KEY}\n")
    config = addresses()
    options = compose.podman_options(compose.read("gateway", {"MRTR_UPSTREAM": server.url}), "gateway", folder)
    async with container("compose", config, *options, *given(config, server)) as box, wire(box.url) as client:
        asked = await client.call("ask", {"question": "Who?"})
        assert (await client.answer(asked, ACCEPT)).text == NAMED
        assert len(box.log("server.started")[0]["key_ids"]) == 1
        assert not [line for line in box.log("config.loaded") if "state.keys is empty" in line.get("note", "")]
        assert box.is_healthy()
