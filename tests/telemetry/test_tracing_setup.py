"""Loading OpenTelemetry: only if traces are on, with an error that names the fix if that fails."""

import json
import subprocess
import sys
from typing import Any

import pytest

from gateway.__main__ import main
from gateway.telemetry import TracesUnavailable, check_traces, open_traces
from tests.support import workbench


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "only otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "only http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "only http/protobuf"),
    ],
)
def test_an_unsupported_exporter_or_protocol_is_an_error_that_names_the_supported_one(
    environment: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(TracesUnavailable, match=f"{name}={value}.*{says}"):
        check_traces()


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_can_switch_traces_off(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    assert open_traces("1", "gw-1") is None


@pytest.fixture
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the extra: a None in sys.modules is a package that cannot be imported."""
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gateway.plugins.otel.traces")


@pytest.mark.usefixtures("_not_installed")
def test_without_the_extra_the_error_names_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.yaml"
    tree = json.loads(workbench.configuration("http://127.0.0.1:9/mcp", traces=True))
    path.write_text(json.dumps(tree))
    assert main(["serve", "--config", str(path)]) == 1
    assert "pip install 'mrtr-gateway[otel]'" in capsys.readouterr().err
    assert main(["check", "--config", str(path)]) == 0
    assert "note: traces: true needs OpenTelemetry" in capsys.readouterr().out


def test_nothing_of_opentelemetry_is_imported_while_traces_are_off() -> None:
    script = "import gateway.__main__, sys; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
