"""The house has floors: every import runs down, no two files need each other, and each file says what it is for."""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "gateway"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {"entry"},
            {"__main__"},
            {"plugins/workers"},
            {"plugins/oauth", "plugins/otel", "plugins/sep_1442", "plugins/status_page"},
            {"server", "tools/demo", "tools/probe"},
            {"tools/probe/steps"},
            {"tools/probe/report"},
            {"stdio_front"},
            {"admin"},
            {"downstream"},
            {"mirror/streamable", "transport_relay"},
            {"mirror"},
            {"tasks"},
            {"bridge", "passthrough", "auth"},
            {"legacy_front"},
            {"engine", "parking"},
            {"routes"},
            {"sessions/pool"},
            {"sessions"},
            {"upstream/children", "upstream/http"},
            {"upstream"},
            {"children", "cluster"},
            {"http"},
            {"http/server"},
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
            {"", "plugins", "world", "shell_completion", "container_health"},
        ),
    )
)
"""The folders of `gateway/`, the top floor first. A file imports from its own folder and from lower floors."""

LIBRARIES: dict[str, set[str]] = {
    "shell_completion": {"shtab"},
    "entry": set(),
    "__main__": set(),
    "server": {"multidict"},
    "tools/demo": {"mcp", "mcp_types", "pydantic", "uvicorn"},
    "tools/probe": {"msgspec", "multidict", "yarl"},
    "tools/probe/steps": {"cryptography", "msgspec", "multidict", "yarl"},
    "tools/probe/report": {"msgspec"},
    "stdio_front": {"msgspec", "multidict"},
    "downstream": {"msgspec"},
    "admin": set(),
    "plugins/oauth": {"multidict", "yarl"},
    "plugins/otel": {"opentelemetry"},
    "plugins/sep_1442": {"msgspec", "multidict"},
    "plugins/status_page": {"jinja2", "markdown_it", "msgspec"},
    "plugins/workers": {"aiohttp"},
    "mirror/streamable": {"msgspec"},
    "tasks": {"msgspec"},
    "bridge": {"msgspec"},
    "transport_relay": {"msgspec"},
    "legacy_front": {"msgspec", "multidict"},
    "mirror": {"msgspec", "yarl"},
    "passthrough": {"msgspec", "multidict", "yarl"},
    "engine": set(),
    "parking": {"msgspec"},
    "routes": {"msgspec"},
    "sessions/pool": {"msgspec"},
    "sessions": {"msgspec"},
    "upstream/children": {"msgspec"},
    "upstream/http": {"msgspec", "yarl"},
    "upstream": {"msgspec"},
    "children": {"msgspec"},
    "cluster": {"msgspec", "yarl"},
    "auth": {"msgspec", "multidict", "yarl"},
    "http_client": {"aiohappyeyeballs", "httptools", "msgspec", "yarl"},
    "http": {"msgspec", "multidict", "yarl"},
    "http/server": {"httptools", "msgspec", "multidict", "yarl"},
    "runtime": {"msgspec", "uvloop"},
    "seal": {"cryptography", "msgspec"},
    "telemetry": {"msgspec", "structlog"},
    "telemetry/metrics": {"msgspec", "prometheus_client"},
    "config": {"cryptography", "msgspec"},
    "config/model": {"msgspec"},
    "config/parsing": {"msgspec", "yaml"},
    "exchange": {"msgspec"},
    "protocol": {"msgspec", "multidict"},
    "protocol/json_text": {"msgspec"},
    "identity": {"cryptography", "jwt", "msgspec", "yarl"},
    "": set(),
    "plugins": set(),
    "world": set(),
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
    "tools/probe/report",
    "",
    "container_health",
    "entry",
}
IMPURE_MODULES = {
    *("asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets"),
    *("select", "selectors", "signal", "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "uuid"),
}


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


@cache
def first_sentence(file: Path) -> str:
    return (ast.get_docstring(parsed(file)) or "").split("\n\n")[0].replace("\n", " ")


@cache
def imports_of(file: Path) -> tuple[tuple[ast.Import | ast.ImportFrom, str], ...]:
    return tuple(imports(parsed(file)))


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
    """Modules that `importlib` loads: every string that is the dotted name of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and source(node.value) is not None:
            yield node.value


def source(dotted: str) -> Path | None:
    """The file of the module that `dotted` is, or is in; None unless the package or the tests have it."""
    parts = dotted.split(".")
    if parts[0] not in {"gateway", "tests"} or len(parts) < 2:
        return None
    for length in range(len(parts), 0, -1):
        path = REPOSITORY.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None


@cache
def needed(file: Path) -> set[Path]:
    """The files of the package and the tests that `file` imports, for types or at run time, or loads by name."""
    names = {name for _, name in imports_of(file)} | set(loaded_by_name(parsed(file)))
    return {found for name in names if (found := source(name)) is not None and found != file}


def check(rule: Callable[[Path], Iterator[str]]) -> None:
    """Fail with all that a rule finds in the files."""
    found = [f"{file.relative_to(PACKAGE)}: {complaint}" for file in FILES for complaint in rule(file)]
    assert not found, "\n".join(["", *found])


def test_every_folder_has_a_floor_and_a_list_of_libraries() -> None:
    folders = {folder(each) for each in FILES}
    assert folders == set(LIBRARIES)
    assert folders == set().union(*FLOORS)


def runs_up(file: Path) -> Iterator[str]:
    here = folder(file)
    for other in needed(file):
        there = folder(other)
        if there.startswith("plugins/") and not here.startswith("plugins/"):
            continue  # for types, as `imports_a_plugin` checks
        if there != here and floor(there) <= floor(here):
            yield f"imports {other.relative_to(PACKAGE)} of a floor that is not lower"


def test_imports_run_down() -> None:
    check(runs_up)


def test_no_two_files_need_each_other() -> None:
    below = {file: needed(file) for file in FILES}
    while leaves := [file for file, files in below.items() if not files]:
        for leaf in leaves:
            del below[leaf]
        below = {file: files.difference(leaves) for file, files in below.items()}
    assert not below, f"a circle of imports among {sorted(str(file.relative_to(PACKAGE)) for file in below)}"


def says_nothing(file: Path) -> Iterator[str]:
    first = first_sentence(file)
    if not first:
        yield "the file has no docstring"
    elif not first.endswith("."):
        yield f"{first!r} is not a sentence"


def test_a_file_says_in_one_sentence_what_it_is_for() -> None:
    check(says_nothing)


def imports_oddly(file: Path) -> Iterator[str]:
    functions = [
        node
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(node) for function in functions for node, _ in imports(function)}
    for node, name in imports_of(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: {name} is relative"
        if id(node) in inside:
            yield f"line {node.lineno}: {name} is imported inside a function"


def test_imports_are_absolute_and_at_the_top() -> None:
    check(imports_oddly)


def imports_foreign_libraries(file: Path) -> Iterator[str]:
    tops = {name.split(".")[0] for _, name in imports_of(file)} - {"gateway"}
    yield from sorted(tops - sys.stdlib_module_names - LIBRARIES[folder(file)])


def test_a_folder_imports_only_its_libraries() -> None:
    check(imports_foreign_libraries)


def imports_a_plugin(file: Path) -> Iterator[str]:
    if not folder(file).startswith("plugins/"):
        yield from plugins_in(parsed(file))


def plugins_in(tree: ast.Module) -> Iterator[str]:
    """Everything of plug-ins that is imported, or loaded by name, when the program runs."""
    guards = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for_types = {id(node) for guard in guards for part in guard.body for node, _ in imports(part)}
    names = [name for node, name in imports(tree) if id(node) not in for_types]
    for name in (*names, *loaded_by_name(tree)):
        if name.startswith("gateway.plugins.") and ".loader." not in name:
            yield name


def test_the_core_imports_no_plugin() -> None:
    """`gateway/plugins/loader.py` loads them; OpenTelemetry, which one of them needs, is an extra."""
    check(imports_a_plugin)


def imports_context_variables(file: Path) -> Iterator[str]:
    yield from (name for _, name in imports_of(file) if name.split(".")[0] == "contextvars")


def test_no_file_has_context_variables() -> None:
    """The event loop of the simulation gives no task a context of its own."""
    check(imports_context_variables)


def is_asynchronous(file: Path) -> Iterator[str]:
    if folder(file) in SYNCHRONOUS:
        kinds = ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await
        yield from (f"line {node.lineno} waits" for node in ast.walk(parsed(file)) if isinstance(node, kinds))
        yield from {"asyncio", "aiohttp", "uvloop"} & {name.split(".")[0] for _, name in imports_of(file)}


def test_only_the_edge_is_asynchronous() -> None:
    check(is_asynchronous)


def is_impure(file: Path) -> Iterator[str]:
    if folder(file) in PURE:
        yield from IMPURE_MODULES & {name.split(".")[0] for _, name in imports_of(file)}


def test_a_pure_folder_has_no_clock_no_randomness_and_no_io() -> None:
    check(is_impure)


def keeps_the_real_world(tree: ast.Module) -> Iterator[str]:
    fields = (node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "default_factory")
    yield from (found for field in fields if (found := ast.unparse(field.value)).startswith("world."))


def test_no_field_keeps_a_clock_of_the_real_world_where_a_simulation_enters_another() -> None:
    check(lambda file: keeps_the_real_world(parsed(file)))


def test_these_tests_see_what_they_look_for() -> None:
    tree = ast.parse("import os.path\nfrom . import a\nfrom b.c import d as e\ndef f():\n    import g\n")
    assert [name for _, name in imports(tree)] == ["os.path", "a", "b.c.d", "g"]
    assert list(loaded_by_name(ast.parse('load("gateway.plugins.otel.traces")'))) == ["gateway.plugins.otel.traces"]
    guarded = (
        "if TYPE_CHECKING:\n    from gateway.plugins.oauth import a\nelse:\n    from gateway.plugins.oauth import b\n"
    )
    loaded = 'load("gateway.plugins.otel.traces")\nfrom gateway.plugins.loader import find\n'
    assert list(plugins_in(ast.parse(guarded + loaded))) == ["gateway.plugins.oauth.b", "gateway.plugins.otel.traces"]
    assert source("gateway.protocol.jsonrpc.decode") == PACKAGE / "protocol" / "jsonrpc.py"
    assert source("aiohttp.web") is None
    fields = ast.parse("a = field(default_factory=world.wall)\nb = field(default_factory=lambda: world.wall())\n")
    assert list(keeps_the_real_world(fields)) == ["world.wall"]
