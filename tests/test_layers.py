"""The house has floors: every import runs down, no two files need each other, and each file says what it is for."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "gateway"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {"entry"},
            {"__main__"},
            {"server", "demo", "probe"},
            {"probe/steps"},
            {"probe/report"},
            {"stdio_front"},
            {"downstream", "admin"},
            {"sep_1442"},
            {"mirror/streamable"},
            {"mirror"},
            {"tasks"},
            {"bridge", "passthrough", "transport_relay"},
            {"legacy_front"},
            {"routes"},
            {"sessions/pool"},
            {"sessions"},
            {"upstream/children", "upstream/http"},
            {"upstream"},
            {"process", "cluster", "auth"},
            {"http"},
            {"http_client"},
            {"runtime"},
            {"seal", "telemetry"},
            {"telemetry/metrics"},
            {"config"},
            {"config/model"},
            {"config/parsing"},
            {"exchange"},
            {"protocol", "identity"},
            {"protocol/json_text"},
            {"", "shell_completion", "container_health"},
        ),
    )
)
"""The folders of `gateway/`, the top floor first. A file imports from its own folder and from lower floors."""

LIBRARIES: dict[str, set[str]] = {
    "shell_completion": set(),
    "entry": set(),
    "__main__": set(),
    "server": set(),
    "demo": {"mcp", "mcp_types", "pydantic", "uvicorn"},
    "probe": {"msgspec", "multidict", "yarl"},
    "probe/steps": {"cryptography", "msgspec", "multidict", "yarl"},
    "probe/report": {"msgspec"},
    "stdio_front": {"aiohttp", "msgspec", "multidict"},
    "downstream": {"aiohttp", "msgspec"},
    "admin": {"aiohttp", "jinja2", "msgspec"},
    "sep_1442": {"aiohttp", "msgspec", "multidict"},
    "mirror/streamable": {"aiohttp", "msgspec"},
    "tasks": {"msgspec"},
    "bridge": {"msgspec"},
    "transport_relay": {"msgspec"},
    "legacy_front": {"aiohttp", "msgspec", "multidict"},
    "mirror": {"msgspec", "yarl"},
    "passthrough": {"aiohttp", "msgspec", "multidict", "yarl"},
    "routes": {"msgspec"},
    "sessions/pool": {"msgspec"},
    "sessions": {"msgspec"},
    "upstream/children": {"msgspec"},
    "upstream/http": {"msgspec", "yarl"},
    "upstream": {"msgspec"},
    "process": {"msgspec"},
    "cluster": {"aiohttp", "msgspec", "multidict", "yarl"},
    "auth": {"aiohttp", "msgspec", "multidict", "yarl"},
    "http_client": {"aiohappyeyeballs", "httptools", "yarl"},
    "http": {"aiohttp", "msgspec", "multidict", "yarl"},
    "runtime": {"uvloop"},
    "seal": {"cryptography", "msgspec"},
    "telemetry": {"msgspec", "opentelemetry", "structlog"},
    "telemetry/metrics": {"msgspec", "prometheus_client"},
    "config": {"cryptography", "msgspec"},
    "config/model": {"msgspec"},
    "config/parsing": {"msgspec", "yaml"},
    "exchange": {"msgspec"},
    "protocol": {"msgspec"},
    "protocol/json_text": {"msgspec"},
    "identity": {"cryptography", "jwt", "msgspec"},
    "": set(),
    "container_health": {"yaml"},
}
"""The libraries that each folder may import."""

PURE = {"exchange", "protocol", "protocol/json_text"}
"""Folders whose results depend on their arguments alone."""
SYNCHRONOUS = {
    *PURE,
    "identity",
    "seal",
    "telemetry",
    "telemetry/metrics",
    "config",
    "config/model",
    "config/parsing",
    "probe/report",
    "",
    "container_health",
    "entry",
}
IMPURE_MODULES = {
    *("asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets"),
    *("select", "selectors", "signal", "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "uuid"),
}
MAX_FILES = 14
"""Files in one folder, `__init__.py` not counted."""


def folder(file: Path) -> str:
    """The folder of a file as `FLOORS` names it; a file directly in `gateway/` is a folder of its own."""
    parts = file.relative_to(PACKAGE).parts
    if len(parts) > 1:
        return "/".join(parts[:-1])
    name = parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def floor(name: str) -> int:
    """The number of a folder's floor, 0 being the top one."""
    return next(number for number, names in enumerate(FLOORS) if name in names)


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Every import with the dotted name of what it binds, whether a module or something in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}" if node.module else alias.name


def loaded_by_name(tree: ast.AST) -> Iterator[str]:
    """Modules of this package that `importlib` loads: every string that is the dotted name of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and source(node.value) is not None:
            yield node.value


def source(dotted: str) -> Path | None:
    """The file of the module that `dotted` is, or is in; None for a name that is not of this package."""
    parts = dotted.split(".")
    if parts[0] != "gateway" or len(parts) < 2:
        return None
    for length in range(len(parts), 0, -1):
        path = REPOSITORY.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None


def needed(file: Path) -> set[Path]:
    """The files of this package that `file` imports, for types or at run time, or loads by name."""
    tree = parsed(file)
    names = {name for _, name in imports(tree)} | set(loaded_by_name(tree))
    return {found for name in names if (found := source(name)) is not None and found != file}


@pytest.fixture(params=FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def file(request: pytest.FixtureRequest) -> Path:
    found = request.param
    assert isinstance(found, Path)
    return found


def test_every_folder_has_a_floor_and_a_list_of_libraries() -> None:
    folders = {folder(each) for each in FILES}
    assert folders == set(LIBRARIES)
    assert folders == set().union(*FLOORS)


def test_imports_run_down(file: Path) -> None:
    here = folder(file)
    for other in needed(file):
        there = folder(other)
        if there != here:
            assert floor(there) > floor(here), (
                f"{here} imports {other.relative_to(PACKAGE)} of a floor that is not lower"
            )


def test_no_two_files_need_each_other() -> None:
    below = {file: needed(file) for file in FILES}
    while leaves := [file for file, files in below.items() if not files]:
        for leaf in leaves:
            del below[leaf]
        below = {file: files.difference(leaves) for file, files in below.items()}
    assert not below, f"a circle of imports among {sorted(str(file.relative_to(PACKAGE)) for file in below)}"


def test_a_folder_stays_small() -> None:
    count: dict[str, int] = {}
    for each in FILES:
        if each.name != "__init__.py":
            count[folder(each)] = count.get(folder(each), 0) + 1
    assert {name: files for name, files in count.items() if files > MAX_FILES} == {}


def test_a_file_says_in_one_sentence_what_it_is_for(file: Path) -> None:
    documented = ast.get_docstring(parsed(file))
    assert documented, "the file has no docstring"
    first = documented.split("\n\n")[0].replace("\n", " ")
    assert first.endswith("."), f"{first!r} is not a sentence"


def test_the_first_line_of_a_file_is_one_sentence_without_and(file: Path) -> None:
    first = (ast.get_docstring(parsed(file)) or "").split("\n\n")[0].replace("\n", " ")
    assert ". " not in first, f"{first!r} is more than one sentence: leave an empty line after the first one"
    assert " and " not in first, f"{first!r} names two things: split the file, or name what they have in common"


def test_imports_are_absolute_and_at_the_top(file: Path) -> None:
    tree = parsed(file)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(node) for function in functions for node, _ in imports(function)}
    for node, name in imports(tree):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"line {node.lineno}: {name} is relative"
        assert id(node) not in inside, f"line {node.lineno}: {name} is imported inside a function"


def test_a_folder_imports_only_its_libraries(file: Path) -> None:
    tops = {name.split(".")[0] for _, name in imports(parsed(file))} - {"gateway"}
    assert tops - sys.stdlib_module_names <= LIBRARIES[folder(file)]


def test_opentelemetry_is_imported_in_one_file(file: Path) -> None:
    """It is an extra: `telemetry/tracing_setup.py` loads that file by name where traces are on."""
    if file.name != "otel.py":
        assert not [name for _, name in imports(parsed(file)) if "opentelemetry" in name]


def test_only_the_edge_is_asynchronous(file: Path) -> None:
    if folder(file) not in SYNCHRONOUS:
        return
    tree = parsed(file)
    kinds = ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)]
    assert not {"asyncio", "aiohttp", "uvloop"} & {name.split(".")[0] for _, name in imports(tree)}


def test_a_pure_folder_has_no_clock_no_randomness_and_no_io(file: Path) -> None:
    if folder(file) in PURE:
        assert not IMPURE_MODULES & {name.split(".")[0] for _, name in imports(parsed(file))}


def test_these_tests_see_what_they_look_for() -> None:
    tree = ast.parse("import os.path\nfrom . import a\nfrom b.c import d as e\ndef f():\n    import g\n")
    assert [name for _, name in imports(tree)] == ["os.path", "a", "b.c.d", "g"]
    assert list(loaded_by_name(ast.parse('load("gateway.telemetry.otel")'))) == ["gateway.telemetry.otel"]
    assert source("gateway.protocol.jsonrpc.decode") == PACKAGE / "protocol" / "jsonrpc.py"
    assert source("aiohttp.web") is None
