"""Alerts and dashboard of deploy/: promtool checks them, and a real Prometheus answers each query.

The Prometheus scrapes two real gateways while a real client and others use them. Each query must be answered, and
must have data where it is not in SILENT.
"""

import asyncio
import itertools
import json
import math
import re
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway import telemetry, world
from gateway.runtime.call_bytes import CallBytes
from gateway.telemetry import Metrics
from gateway.telemetry.metrics import labels
from tests.e2e.wire import ACCEPT, NAMED, wire
from tests.parts.clients.drive import ModernClient, elicit, modern_client
from tests.parts.launch import REPOSITORY, free_port, old_server, stdio_upstream
from tests.support.cluster import memberships
from tests.support.gateway_process import Gateway, gateway
from tests.support.programs import verdict
from tests.support.prometheus import DIRECTORY, Prometheus, installed, prometheus
from tests.support.workbench import Client

DASHBOARD: Final = json.loads((REPOSITORY / "deploy" / "grafana" / "mrtr-gateway.json").read_text())
RULES: Final = yaml.safe_load((DIRECTORY / "alerts.yml").read_text())["groups"][0]["rules"]
CASES: Final = yaml.safe_load((DIRECTORY / "alerts.test.yml").read_text())["tests"]
RUNBOOK: Final = (REPOSITORY / "docs" / "monitoring.md").read_text()

SILENT: Final = {"mcp_gateway_peer_rejected_total": "only replicas use the peer port"}
"""Metrics whose queries need not have data, each with its reason."""

WORDS: Final[dict[tuple[str, str], Iterable[str]]] = {
    ("mcp_gateway_continuations_total", "step"): telemetry.Step,
    ("mcp_gateway_upstream_errors_total", "kind"): labels.UPSTREAM_FAILURES,
    ("mcp_gateway_downstream_rejected_total", "reason"): labels.REJECTIONS,
    ("mcp_gateway_state_rejected_total", "reason"): labels.STATE_REASONS,
    ("mcp_gateway_peer_rejected_total", "reason"): labels.PEER_REASONS,
    ("mcp_gateway_peer_requests_total", "outcome"): telemetry.PeerOutcome,
    ("mcp_gateway_children_ended_total", "why"): ("asked", "unasked"),
    ("mcp_gateway_config_reloads_total", "outcome"): ("applied", "rejected"),
    ("mcp_gateway_sessions", "state"): telemetry.SessionState,
    ("mcp_gateway_budget_bytes", "budget"): (CallBytes.name,),
    ("mcp_gateway_budget_limit_bytes", "budget"): (CallBytes.name,),
}
"""The possible values of the labels that queries name."""


@pytest.mark.parametrize("name", ["prometheus/alerts.yml", "grafana/mrtr-gateway.json"])
def test_descriptors_that_new_calls_may_take_are_counted_as_the_gateway_does(name: str) -> None:
    text = (REPOSITORY / "deploy" / name).read_text()
    (kept,) = re.findall(
        r"\(process_max_fds\S* ?\S* - (\d+) - clamp_max\(process_max_fds\S* ?\S* / (\d+), (\d+)\)\)", text
    )
    spare, part, most = map(int, kept)
    for limit in (256, 4_096, 65_536):
        assert world.kept_descriptors(limit) == spare + min(limit // part, most)


needs_prometheus = pytest.mark.skipif(not installed(), reason="apt install prometheus")


def promtool(*arguments: str | Path, stdin: str | None = None) -> tuple[int, str]:
    return verdict("promtool", *arguments, input=stdin)


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    """Title and expression of every target."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


EXPRESSIONS: Final = [*queries(), *((rule["alert"], rule["expr"]) for rule in RULES)]


# --- what promtool says ---


@needs_prometheus
def test_promtool_accepts_the_alerts_and_the_configuration() -> None:
    code, said = promtool("check", "rules", DIRECTORY / "alerts.yml")
    assert (code, f"SUCCESS: {len(RULES)} rules found" in said) == (0, True), said
    code, said = promtool("check", "config", DIRECTORY / "prometheus.yml")
    assert code == 0, said


@needs_prometheus
def test_each_alert_fires_only_when_it_should() -> None:
    code, said = promtool("test", "rules", DIRECTORY / "alerts.test.yml")
    assert code == 0, said


@needs_prometheus
def test_promtool_notices_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    """The threshold of one alert is doubled."""
    text = (DIRECTORY / "alerts.yml").read_text()
    assert text.count("> 0.05\n") == 1
    (tmp_path / "alerts.yml").write_text(text.replace("> 0.05\n", "> 0.5\n"))
    shutil.copy(DIRECTORY / "alerts.test.yml", tmp_path)
    code, said = promtool("test", "rules", tmp_path / "alerts.test.yml")
    assert code != 0
    assert "MrtrGatewayUpstreamFailing" in said


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    found = {rule["alert"]: set[bool]() for rule in RULES}
    for case in CASES:
        for test in case["alert_rule_test"]:
            found[test["alertname"]].add(bool(test["exp_alerts"]))
    assert found == {rule["alert"]: {True, False} for rule in RULES}


# --- names ---


def families() -> dict[str, tuple[str, ...]]:
    """Every sample name of the gateway, with its labels."""
    found: dict[str, tuple[str, ...]] = {}
    for family in Metrics("1", ["/mcp"]).series.registry.collect():
        labels = tuple(getattr(family, "_labelnames", ()))
        ends = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",)}.get(family.type, ("",))
        for end in ends:
            found[family.name + end] = (*labels, "le") if end == "_bucket" else labels
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_name_in_a_query_exists(where: str, expression: str) -> None:
    known = {**families(), "up": ()}
    selectors = re.findall(r"\b((?:mcp|process)_\w+|up)\b(?:\{([^}]*)\})?", expression)
    assert selectors, where
    for name, matchers in selectors:
        assert name in known, f"{where}: {name}"
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            assert label in {*known[name], "job", "instance"}, f"{where}: {name} has no label {label}"
            if label in {"job", "instance", "route"}:
                continue
            for each in value.split("|") if "~" in operator else [value]:
                assert any(re.fullmatch(each, word) for word in WORDS[name, label]), (
                    f"{where}: {label} is never {each}"
                )
    labels = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
    assert labels <= {"job", "instance", *itertools.chain.from_iterable(known[name] for name, _ in selectors)}, where


def test_counters_in_alerts_start_at_zero() -> None:
    """A counter that appears with 1 has no increase."""
    body = Metrics("1", ["/mcp"]).render()
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    seen = 0
    for rule in RULES:
        for name, matchers in re.findall(r"increase\((\w+)(?:{([^}]*)})?\[", rule["expr"]):
            wanted = re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers)
            found = [sample for sample in samples if sample.name == name]
            for label, operator, value in wanted:
                matches = re.compile(value if operator == "=~" else re.escape(value)).fullmatch
                found = [one for one in found if bool(matches(one.labels[label])) is (operator != "!=")]
            assert found, f"{rule['alert']}: {name} {wanted}"
            seen += 1
    assert seen > 7


def test_the_command_of_the_readme_makes_links_of_the_runbooks_paths(tmp_path: Path) -> None:
    file = tmp_path / "alerts.yml"
    shutil.copy(DIRECTORY / "alerts.yml", file)
    (command,) = re.findall(r"^sed .+$", (DIRECTORY / "README.md").read_text(), re.MULTILINE)
    for _ in range(2):  # the second time it changes nothing
        assert verdict("sh", "-c", command.replace("/etc/prometheus/alerts.yml", str(file)))[0] == 0
    for old, new in zip(RULES, yaml.safe_load(file.read_text())["groups"][0]["rules"], strict=True):
        path = old["annotations"]["runbook_url"]
        assert new["annotations"]["runbook_url"] == f"http://gw-1.example.com:9464/{path}"


def test_alerts_and_sections_of_the_runbook_match() -> None:
    sections = re.findall(r"^### (Mrtr\w+)$", RUNBOOK, re.MULTILINE)
    assert sections == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert {"summary", "description"} < rule["annotations"].keys()


def test_the_limits_that_alerts_tell_apart_are_keys() -> None:
    """In the label `limit`; the tests of promtool have the texts with each."""
    configuration = (REPOSITORY / "docs" / "configuration.md").read_text()
    named = [key for rule in RULES for key in re.findall(r'"limit", "([^"]+)"', rule["expr"])]
    assert len(named) == len({*named}) > 4
    for key in named:
        assert f"| `{key}` |" in configuration or f"| `routes[].{key}` |" in configuration, key


def test_every_alert_that_a_panel_names_exists() -> None:
    named = {word for panel in panels() for word in re.findall(r"Mrtr\w+", panel["description"])}
    assert named
    assert named <= {rule["alert"] for rule in RULES}


def test_the_panels_of_the_dashboard_fit_the_grid() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["description"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]


def test_the_provisioned_datasource_fits_the_dashboard() -> None:
    folder = REPOSITORY / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasource.yaml").read_text())["datasources"]
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource")
    assert source["type"] == variable["query"] == "prometheus"
    interval = yaml.safe_load((DIRECTORY / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = yaml.safe_load((folder / "dashboards.yaml").read_text())["providers"]
    assert provider["type"] == "file"


# --- a real Prometheus ---


class Traffic:
    """Continuous traffic through two gateways, because Prometheus sees a rate only between two scrapes."""

    def __init__(self, gateways: list[Gateway], client: ModernClient, plain: Client) -> None:
        self.gateways = gateways
        self.client = client
        self.one = plain.on(gateways[0].url)
        self.other = plain.on(gateways[1].url)

    async def pass_by(self) -> None:
        """A bit of everything: without one of these lines, a panel would be empty."""
        answered = await self.client.call_tool("ask", {"question": "Who?"}, answers=[elicit(ACCEPT)])
        assert answered.text == NAMED
        asked = await self.one.call("ask", {"question": "Who?"})
        assert (await self.other.answer(asked, ACCEPT)).text == NAMED  # forwarded
        assert (await self.one.call("progress", {"steps": 2}, meta={"progressToken": "p"})).text == "done"
        assert (await self.one.post("tools/nonsense")).status == 404
        forged = asked.state[:-4] + ("AAAA" if asked.state[-4:] != "AAAA" else "BBBB")
        refused = await self.one.call("ask", {"question": "Who?"}, state=forged)
        assert refused.refusal == (400, -32602)
        broken = self.one.on(self.gateways[0].base + "/broken")
        assert (await broken.call("echo", {"text": "x"})).error["data"]["reason"] == "upstream_unreachable"
        child = self.one.on(self.gateways[0].base + "/child")
        assert (await child.call("echo", {"text": "x"})).text == "x"
        old = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        await self.one.raw({"Content-Type": "application/json"}, json.dumps(old).encode())  # passed through

    async def hold(self) -> None:
        """One call stays parked."""
        assert (await self.one.call("ask", {"question": "Who?"})).asks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[tuple[Prometheus, Traffic]]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(old_server("ts132"))
        routes = [
            {"path": "/mcp", "upstream": {"url": server.url}},
            {"path": "/broken", "upstream": {"url": f"http://127.0.0.1:{free_port()}/mcp"}},
            {"path": "/child", "upstream": stdio_upstream("ts132")},
        ]
        gateways = [
            await enter(gateway(server.url, replica=membership, routes=routes)) for membership in memberships(2)
        ]
        found = await enter(prometheus([gw.config["admin"] for gw in gateways]))
        client = await enter(modern_client("ts"))
        assert (await client.connect(gateways[0].url)).ok
        assert await client.listen({"toolsListChanged": True})
        traffic = Traffic(gateways, client, await enter(wire(gateways[0].url)))

        async def scraped() -> bool:
            return len([one for one in await found.query("up == 1") if one["metric"]["job"] == "mrtr-gateway"]) == 2

        await found.until(scraped, "both gateways are scraped")
        await traffic.hold()
        yield found, traffic


real = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    needs_prometheus,
]


def marked(test: Any) -> Any:
    for mark in real:
        test = mark(test)
    return test


def has_data(series: list[dict[str, Any]]) -> bool:
    return any(not math.isnan(float(one["value"][1])) for one in series)


async def concrete(found: Prometheus, expression: str) -> str:
    """Replace variables as Grafana does: `All` of a variable is all its values."""
    values = {"rate_interval": "8s", "interval": "8s", "range": "2m", "__rate_interval": "8s", "__interval": "8s"}
    values["__range"] = "2m"
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match is not None
            offered = await found.label_values(match[2], substitute(match[1], values))
            assert offered, f"the variable {variable['name']} offers nothing"
            values[variable["name"]] = "|".join(map(re.escape, offered)).replace("\\", "\\\\")
    return substitute(expression, values)


def substitute(expression: str, values: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)


@marked
async def test_prometheus_has_data_for_every_query_of_the_dashboard(
    stage: tuple[Prometheus, Traffic],
) -> None:
    found, traffic = stage
    everything = {(title, await concrete(found, expression)) for title, expression in queries()}
    for _, expression in everything:
        await found.query(expression)  # raises if Prometheus does not understand it
    waiting = {
        (title, expression) for title, expression in everything if not any(map(expression.__contains__, SILENT))
    }
    assert len(waiting) > 40

    async def all_have_data() -> bool:
        await traffic.pass_by()
        for title, expression in sorted(waiting):
            if has_data(await found.query(expression)):
                waiting.discard((title, expression))
        return not waiting

    try:
        await found.until(all_have_data, "every query has data", 40)
    except AssertionError as exc:
        exc.add_note("without data: " + "\n".join(f"{title}: {expression}" for title, expression in sorted(waiting)))
        raise


@marked
async def test_prometheus_evaluates_every_alert_and_the_right_one_fires(stage: tuple[Prometheus, Traffic]) -> None:
    found, traffic = stage

    async def judged() -> list[dict[str, Any]]:
        (group,) = (await found.get("rules"))["groups"]
        rules: list[dict[str, Any]] = group["rules"]
        return rules

    async def forged_states_are_noticed() -> bool:
        await traffic.pass_by()
        states = {rule["name"]: rule["state"] for rule in await judged()}
        return states["MrtrGatewayStatesForged"] == "firing"

    await found.until(forged_states_are_noticed, "MrtrGatewayStatesForged fires", 40)
    rules = await judged()
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in RULES]
    assert {(rule["name"], rule["health"], rule.get("lastError")) for rule in rules} == {
        (rule["alert"], "ok", None) for rule in RULES
    }
    states = {rule["name"]: rule["state"] for rule in rules if rule["state"] != "inactive"}
    pending = dict.fromkeys(("MrtrGatewayUpstreamFailing", "MrtrGatewayUpstreamDown"), "pending")
    assert states == {"MrtrGatewayStatesForged": "firing", **pending}


@marked
async def test_promtool_accepts_the_scraped_metrics(stage: tuple[Prometheus, Traffic]) -> None:
    _, traffic = stage
    async with aiohttp.ClientSession() as http, http.get(f"{traffic.gateways[0].admin}/metrics") as response:
        text = await response.text()
    assert text.count("# TYPE ") > 30
    assert await asyncio.to_thread(promtool, "check", "metrics", stdin=text) == (0, "")
    code, said = await asyncio.to_thread(
        promtool, "check", "metrics", stdin=text.replace("_total", "_sum_total_count")
    )
    assert code != 0, said
