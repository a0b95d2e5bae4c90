"""What the simulated network keeps to, as TCP does."""

from tests.simulation.network import Connection
from tests.simulation.world import Simulation


def test_bytes_that_are_sent_again_are_not_overtaken() -> None:
    simulation = Simulation("network")
    network, kernel = simulation.network, simulation.kernel
    one, other = simulation.process("one", "10.0.0.1"), simulation.process("other", "10.0.0.2")
    way = Connection(network, one, (one.host, 1), other, (other.host, 2)).ways[0]
    network.block(one.host, other.host)
    way.push(b"first")
    kernel.run(kernel.now + 0.1)
    network.extra_seconds = 1000.0
    while way.last < kernel.now + 0.1:
        way.push(b"second")
    network.unblock(one.host, other.host)
    kernel.run(kernel.now + 2000.0)
    assert way.receiver.unread[0] == b"first"
    assert set(list(way.receiver.unread)[1:]) == {b"second"}
