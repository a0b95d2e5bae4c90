"""The pages agree with the code, as far as a machine can check."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.config import Config, Upstream, parse
from gateway.config.parsing.retired_keys import RETIRED
from gateway.protocol import mcp
from gateway.telemetry.metrics.labels import STATE_REASONS
from tests.docs.pages import PAGES, Block, anchors, blocks, links, named
from tests.e2e.test_table import ALL_CLIENTS, ALL_SERVERS, CELLS
from tests.parts.launch import REPOSITORY
from tests.support.authority import Authority
from tests.support.configurations import drain_seconds
from tests.support.programs import output
from tests.support.signer import jwks, private, public_jwk
from tests.test_layers import FILES, FLOORS, PACKAGE, folder

ENVIRONMENT = {
    "MRTR_STATE_KEY": "0f" * 32,
    "OLD_KEY": "0e" * 32,
    "NEW_KEY": "0d" * 32,
    "API_KEY": "x",
    "POD_NAME": "gw-1",
}
FOREIGN = {"apiVersion", "services", "groups", "scrape_configs", "rule_files", "global"}
"""The beginnings of YAML for other programs: Kubernetes, Compose, Prometheus."""
WHOLE = "routes: [{upstream: {url: 'http://127.0.0.1:9000/mcp'}}]"

DEFAULT = re.compile(
    r"`(?P<section>[a-z]+)\.(?P<key>[a-z_]+)`(?:, | \()(?P<number>[\d,.]*\d)(?: (?P<unit>s|ms|KiB|MiB)\b)?"
)
UNITS = {None: 1, "s": 1, "ms": 0.001, "KiB": 1024, "MiB": 1024**2}


def printed(script: str) -> str:
    return output(sys.executable, REPOSITORY / "scripts" / script)


def yaml_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.kind in {"yaml", "yml"}]


@pytest.mark.parametrize(
    ("page", "script"),
    [("configuration", "configuration"), ("metrics", "metrics"), ("logs", "events"), ("interop", "interop")],
)
def test_a_page_is_the_output_of_its_script(page: str, script: str) -> None:
    told = (REPOSITORY / "docs" / f"{page}.md").read_text()
    assert told == printed(f"print_{script}"), f"run scripts/print_{script} > docs/{page}.md"


def test_the_transition_table_is_the_output_of_its_script() -> None:
    table = printed("print_transitions")
    assert table.count("\n") > 2
    assert f"\n\n{table}\n" in (REPOSITORY / "ARCHITECTURE.md").read_text(), "paste the output of the script"


def section(title: str) -> str:
    """One section of ARCHITECTURE.md."""
    page = (REPOSITORY / "ARCHITECTURE.md").read_text()
    return re.split(r"^#{2,3} ", page.partition(f" {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def definitions(file: Path) -> set[str]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def test_the_code_map_has_every_folder_in_import_order() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", section("Code map"), re.MULTILINE)
    told = [name.removesuffix(".py").removesuffix("/") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    floors = [next(number for number, names in enumerate(FLOORS) if name in names) for name in told]
    assert set(told) == {folder(file) for file in FILES} - {""}
    health = told.pop(), floors.pop()
    assert (floors, health[0]) == (sorted(floors), "container_health")


def test_every_entry_point_is_defined_where_the_code_map_says() -> None:
    rows = re.findall(r"^\| `([\w/]+)(?:\.py)?`.* \|.*\| (.+) \|$", section("Code map"), re.MULTILINE)
    points = [(name, *point) for name, cell in rows for point in re.findall(r"`(\w+\.py):(\w+)`", cell)]
    assert {name for name, _, _ in points} == {name for name, _ in rows}
    assert max(sum(point[0] == name for point in points) for name, _ in rows) == 3
    for name, file, definition in points:
        place = PACKAGE / name if name.endswith("/") else PACKAGE
        assert definition in definitions(place / file), f"{name}{file} does not define {definition}"


@pytest.mark.parametrize(
    ("text", "name", "root"),
    [
        (section("Where is …?"), r"^\| .+ \| `(.+)` \|$", PACKAGE),
        ((REPOSITORY / "docs" / "model.md").read_text(), r"`(\w+/[\w/]+\.py)`", PACKAGE),
        (
            (REPOSITORY / "docs" / "clients-and-servers.md").read_text(),
            r"`((?:gateway|tests)/[\w/]+\.py)",
            REPOSITORY,
        ),
    ],
    ids=["behaviours", "ways of a call", "clients and servers"],
)
def test_every_file_that_a_table_names_exists(text: str, name: str, root: Path) -> None:
    told = re.findall(name, text, re.MULTILINE)
    assert len(told) >= 10
    assert [name for name in told if not (root / name).is_file()] == []


def defaults() -> list[tuple[str, str]]:
    """The defaults that the pages state: `` `hold.ttl_seconds`, 600 s ``."""
    return [(named(page), said.group()) for page in PAGES for said in DEFAULT.finditer(page.read_text())]


@pytest.mark.parametrize(("where", "said"), defaults())
def test_every_default_on_the_pages_equals_the_code(where: str, said: str) -> None:
    match = DEFAULT.fullmatch(said)
    assert match is not None
    sections = {field.name: field.default for field in msgspec.structs.fields(Config)} | {"upstream": Upstream()}
    section = sections[match["section"]]
    number = float(match["number"].replace(",", "")) * UNITS[match["unit"]]
    assert getattr(section, match["key"]) == pytest.approx(number), where


def words_of_the_wire() -> set[str]:
    """The methods, notifications, codes and reasons that a client can see, from the code."""
    errors = (REPOSITORY / "gateway" / "protocol" / "errors.py").read_text()
    reasons = set(re.findall(r'"reason": "(\w+)"|\breason = "(\w+)"', errors))
    named = {value for name, value in vars(mcp).items() if name.isupper() and isinstance(value, str | int)}
    codes = {str(value) for value in named if isinstance(value, int) and value < -32000}
    methods = {*mcp.METHODS, *(value for value in named if isinstance(value, str) and "notifications/" in value)}
    return (
        methods | codes | {*STATE_REASONS} | {one or other for one, other in reasons} - {"upstream_error"}
    )  # only its kinds


def test_the_protocol_mapping_is_complete() -> None:
    page = (REPOSITORY / "docs" / "protocol.md").read_text()
    assert {word for word in words_of_the_wire() if word not in page} == set()


def test_the_defaults_keep_the_order_that_the_operations_page_asks_for() -> None:
    config = parse(WHOLE, "defaults", {})
    hold, timeouts, sessions = config.hold, config.timeouts, config.sessions
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    assert config.legs.limit_seconds < 60
    assert hold.ttl_seconds <= config.state.ttl_seconds
    assert 2 * timeouts.keepalive_seconds < 60 < timeouts.idle_seconds
    assert sessions.max > hold.max_calls
    assert sessions.max_per_principal > hold.max_calls_per_principal
    assert f"together: {drain_seconds(config):g} s" in page


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=named)
def test_no_page_names_a_key_that_was_retired(page: Path) -> None:
    keys = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", page.read_text()))
    if page.name == "metrics.md":
        keys.remove("limits.arriving_bytes")  # the name of a budget
    assert keys & RETIRED.keys() == set()


def test_there_are_blocks_and_links_to_check() -> None:
    assert {named(block.page) for block in yaml_blocks()} >= {"README.md", "docs/routes.md", "docs/tls.md"}
    assert all(links(REPOSITORY / page) for page in ("README.md", "ARCHITECTURE.md", "docs/README.md"))


@pytest.mark.parametrize("block", yaml_blocks(), ids=lambda block: block.where)
def test_every_yaml_block_is_a_configuration(block: Block, tmp_path: Path) -> None:
    """Load it whole, or as a part, with one route more."""
    given = yaml.safe_load(block.text)
    assert isinstance(given, dict), block.where
    if FOREIGN & given.keys():
        return
    text = block.text if "routes" in given else f"{block.text}\n{WHOLE}\n"
    for key, name in named_files(given):
        file = tmp_path / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CONTENTS[key](tmp_path))
        text = text.replace(name, str(file))
    assert parse(text, str(tmp_path / "gateway.yaml"), ENVIRONMENT).routes


def named_files(given: Any) -> Iterator[tuple[str, str]]:
    """Find the files that a configuration names, each with its key."""
    for key, value in given.items() if isinstance(given, dict) else ():
        if key.endswith("_file"):
            yield key, value
        yield from named_files(value)
    for value in given if isinstance(given, list) else ():
        yield from named_files(value)


def certified(folder: Path) -> str:
    """A certificate and its key: the same pair for all files."""
    pair = folder / "pair.pem"
    return (pair if pair.exists() else Authority(folder, "authority").sign("pair")).read_text()


CONTENTS: dict[str, Callable[[Path], str]] = {
    "cert_file": certified,
    "key_file": certified,
    "ca_file": lambda folder: Authority(folder, "authority").file.read_text(),
    "client_ca_file": lambda folder: Authority(folder, "authority").file.read_text(),
    "jwks_ca_file": lambda folder: Authority(folder, "authority").file.read_text(),
    "jwks_file": lambda _: jwks(public_jwk(private("ES256"))),
    "token_file": lambda _: "secret",
    "keys_file": lambda _: "0f" * 32,
}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{named(page)}: {target}"
        assert found.is_relative_to(REPOSITORY), f"{named(page)}: {target} leaves the repository"
        if anchor:
            assert anchor in anchors(found), f"{named(page)}: {target}; there are {sorted(anchors(found))}"


def test_the_tests_play_every_pair_of_eras_and_transports_in_the_table() -> None:
    page = (REPOSITORY / "docs" / "clients-and-servers.md").read_text().replace("legacy", "old")
    lines = re.findall(r"^\| (.+) \|$", page.partition("\n\n| client ")[2].partition("\n\n")[0], re.MULTILINE)
    columns = re.search(r"server \| (.+) \|", page)
    assert columns is not None
    told = {(line.split(" | ")[0].strip("*"), column) for line in lines for column in columns[1].split(" | ")}
    assert told == {(ALL_CLIENTS[client].row, ALL_SERVERS[server].column) for client, server in CELLS}


def test_every_page_is_in_the_index() -> None:
    index = REPOSITORY / "docs" / "README.md"
    listed = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    pages = {page for page in REPOSITORY.glob("docs/*.md") if page != index}
    assert pages - listed == set(), "add them to docs/README.md"


def test_every_example_is_in_the_table_of_stories() -> None:
    told = set(links(REPOSITORY / "docs" / "configuration.md"))
    assert {f"../config/{path.name}" for path in REPOSITORY.glob("config/*.yaml")} <= told


def test_the_readme_begins_with_the_two_commands_the_installation_and_the_pictures() -> None:
    page = (REPOSITORY / "README.md").read_text()
    title, _, sentence = page.split("\n")[:3]
    assert title.startswith("# ")
    assert sentence
    commands, installation = blocks(REPOSITORY / "README.md")[:2]
    begun = [" ".join(line.split()[:2]) for block in (commands, installation) for line in block.text.splitlines()]
    assert begun == ["make demo", "make test", "pipx install", "pipx run"]
    top, _, _ = page.partition("\n## ")
    pictures = re.findall(r"!\[[^]]*\]\(docs/images/(.+?)\)", top)
    assert pictures == ["demo.svg", "status.png", "exchange.svg"]
    assert top.index(installation.text) < top.index("![")


def test_the_memory_of_a_held_call_is_the_same_on_every_page() -> None:
    """The calculator of docs/monitoring.md is the source of what to plan with, the benchmarks of what was measured."""
    deploy = REPOSITORY / "deploy"
    text = {path: path.read_text() for path in (*PAGES, *deploy.rglob("*.yaml"), *deploy.rglob("*.json"))}
    ((idle, planned, large),) = re.findall(
        r"2 x \((\d+) MiB \+ H x (\d+) KiB \+ (\d+) MiB\)", text[REPOSITORY / "docs" / "monitoring.md"]
    )
    (measured,) = re.findall(r"([\d.]+) KiB a call", (REPOSITORY / "bench" / "README.md").read_text())
    said = {
        (path.relative_to(REPOSITORY), number)
        for path, page in text.items()
        for number in re.findall(
            r"([\d.]+) KiB (?:per held call|for each call that may wait|and two descriptors per call)", page
        )
        + re.findall(r"two file descriptors and about ([\d.]+) KiB", page)
    }
    assert len(said) == 2, "a page says it in other words now"
    assert {number for _, number in said} == {planned}, said
    costs = re.compile(r"(?:memory per held call \||held call costs) ([\d.]+) KiB")
    found = {path.name: number for path, page in text.items() for number in costs.findall(page)}
    assert found == dict.fromkeys(("0001-stateless-while-a-call-is-held.md", "monitoring.md"), measured)
    assert int(large) * UNITS["MiB"] == parse(WHOLE, "defaults", {}).limits.calls_bytes
    limits = [
        (path.name, int(calls.replace(",", "")), int(limit))
        for path, page in text.items()
        for calls, limit in re.findall(
            r"([\d,]+) (?:held )?calls [\w(.) ]*needs?(?:\?\*\*)?(?: [aA] limit of)? (\d+) MiB", page
        )
    ]
    assert {name for name, _, _ in limits} == {
        "monitoring.md",
        "faq.md",
        "values.yaml",
        "deployment.yaml",
    }
    for name, calls, limit in limits:
        assert limit == 2 * (int(idle) + calls * int(planned) // 1024 + int(large)), name
