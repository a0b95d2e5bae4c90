"""The log of two replicas: one call of two rounds, of a real client and a real server, followed by its exchange_id."""

from collections.abc import Iterator

import pytest

from tests.parts.clients.drive import modern_client
from tests.parts.launch import old_server
from tests.support.cluster import Cluster, cluster, needs
from tests.support.workbench import Json

pytestmark = [pytest.mark.real, needs("nginx")]

ON = {"log": {"access": True}}
TRIES = 10
"""The balancer chooses the replica of each round."""


def about(c: Cluster, exchange: str) -> Iterator[tuple[str, Json]]:
    """Each line that `grep` finds in the logs of the replicas, with the replica."""
    for replica in c.replicas:
        for line in replica.log():
            if line.get("exchange_id") == exchange:
                yield replica.config["replica"]["id"], line


async def test_the_lines_with_one_id_tell_of_a_call_over_two_replicas() -> None:
    async with (
        old_server("py130") as server,
        cluster(server.url, replicas=2, **ON) as c,
        modern_client("py") as client,
    ):
        assert (await client.connect(c.url)).ok
        for _ in range(TRIES):
            assert (await client.call_tool("ask", {"question": "Who?"})).ok
        await c.settled()
        calls = [[*about(c, line["exchange_id"])] for line in c.log("exchange.finished")]
    assert len(calls) == TRIES
    for lines in calls:
        rounds = [line for _, line in lines if line["event"] == "request.finished"]
        assert [line["event"] for _, line in lines].count("exchange.finished") == 1
        assert {(line["target"], line["outcome"]) for line in rounds} == {
            ("ask", "input_required"),
            ("ask", "complete"),
        }
        assert len({line["request_id"] for line in rounds}) == len(rounds) == 2
    assert any(len({replica for replica, _ in lines}) == 2 for lines in calls), "the rounds of one reached both"
