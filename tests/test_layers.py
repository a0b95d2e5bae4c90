"""Imports point one way: `__main__ -> probe -> net -> seal, config, principal, telemetry -> core -> errors`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gateway"
FILES = sorted(PACKAGE.rglob("*.py"))

FOREIGN: dict[str, set[str]] = {
    "": set(),
    "core": {"msgspec"},
    "errors": set(),
    "seal": {"cryptography", "msgspec"},
    "config": {"msgspec", "yaml"},
    "principal": {"msgspec"},
    "bearer": {"cryptography", "jwt", "msgspec"},
    "telemetry": {"opentelemetry", "prometheus_client", "structlog"},
    "net": {"aiohttp", "jinja2", "msgspec", "multidict", "uvloop", "yarl"},
    "demo": {"mcp", "mcp_types", "pydantic", "uvicorn"},
    "health": {"yaml"},
    "entry": set(),
    "probe": {"aiohttp", "cryptography", "msgspec", "multidict", "uvloop", "yarl"},
    "__main__": {"uvloop"},
}
"""What each layer may import of other people's."""

OWN: dict[str, set[str]] = {
    "": set(),
    "core": {"core", "errors"},
    "errors": {"core.mcp"},
    "seal": {"", "core", "errors", "seal"},
    "config": {"", "bearer", "config", "core", "errors", "seal"},
    "principal": {"core", "errors"},
    "bearer": {"principal"},
    "telemetry": {"", "core", "errors", "telemetry"},
    "net": {"", "bearer", "config", "core", "errors", "net", "principal", "seal", "telemetry"},
    "demo": {"", "core", "demo"},
    "health": set(),
    "entry": {"health"},
    "__main__": {"", "config", "core", "demo", "errors", "health", "net", "principal", "probe", "seal", "telemetry"},
    "probe": {"", "config", "core", "errors", "net", "probe", "seal", "telemetry"},
}
"""What each layer may import of ours; "" is the package itself (its version)."""

IMPURE = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
}
IMPURE |= {
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
ASYNC_LAYERS = {"net", "demo", "probe", "__main__"}


def layer(file: Path) -> str:
    name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def imported(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Every import with the dotted name of what it binds, as far as modules can be told from their contents."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}" if node.module else alias.name


def modules(file: Path) -> set[str]:
    return {name for _, name in imported(ast.parse(file.read_text()))}


@pytest.fixture(params=FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def file(request: pytest.FixtureRequest) -> Path:
    found = request.param
    assert isinstance(found, Path)
    return found


def test_every_file_has_a_layer(file: Path) -> None:
    assert layer(file) in FOREIGN


def test_imports_are_absolute_and_at_the_top(file: Path) -> None:
    tree = ast.parse(file.read_text())
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(node) for function in functions for node, _ in imported(function)}
    for node, name in imported(tree):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"line {node.lineno}: {name} is relative"
        assert id(node) not in inside, f"line {node.lineno}: {name} is imported inside a function"


def test_only_known_libraries_are_imported(file: Path) -> None:
    tops = {name.split(".")[0] for name in modules(file)} - {"gateway"}
    assert tops - sys.stdlib_module_names <= FOREIGN[layer(file)]


def test_opentelemetry_is_imported_in_one_file_that_nobody_imports(file: Path) -> None:
    """`telemetry.tracing_setup` loads it by name if traces are on."""
    if file.name != "otel.py":
        assert not [
            name for name in modules(file) if "opentelemetry" in name or name.startswith("gateway.telemetry.otel")
        ]


def test_imports_point_one_way(file: Path) -> None:
    allowed = OWN[layer(file)]
    for name in modules(file):
        if name.split(".")[0] != "gateway":
            continue
        rest = name.split(".")[1:]
        top = (
            rest[0]
            if (rest and (PACKAGE / rest[0]).is_dir()) or (PACKAGE / f"{'.'.join(rest[:1])}.py").is_file()
            else ""
        )
        inner = ".".join(rest[:2])
        assert top in allowed or inner in allowed, f"{layer(file)} imports {name}"


def test_only_the_edge_is_asynchronous(file: Path) -> None:
    tree = ast.parse(file.read_text())
    kinds = ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await
    used = [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)]
    if layer(file) not in ASYNC_LAYERS:
        assert not used
        assert not {"asyncio", "aiohttp", "uvloop"} & {name.split(".")[0] for name in modules(file)}


def test_the_core_has_no_clock_no_chance_and_no_world(file: Path) -> None:
    if layer(file) in {"core", "errors"}:
        assert not IMPURE & {name.split(".")[0] for name in modules(file)}


def test_this_test_sees_what_it_looks_for() -> None:
    tree = ast.parse("import os.path\nfrom . import a\nfrom b.c import d as e\ndef f():\n    import g\n")
    assert [name for _, name in imported(tree)] == ["os.path", "a", "b.c.d", "g"]
