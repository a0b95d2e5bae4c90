"""Hosts in network namespaces, joined by links that a test cuts, slows down and makes lossy.

    with network("gw-1", "gw-2", "client") as net:
        ...  # start programs with net["gw-1"].prefix; they listen on net["gw-1"].address
        with net.cut("gw-1", "gw-2"):
            ...  # no packet passes between the two, in either direction

Each host has one TUN device, whose other end this process holds: a packet goes from host to host only if this process
passes it on. So one direction of one link can lose its packets, which is what a real partition looks like: connections
stay open, and nobody is told. This needs root and /dev/net/tun, and neither netem nor a firewall. Namespaces and
devices have no names outside this process, so nothing is left of them when it ends, however it ends.
"""

import asyncio
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import aiohttp

from tests.parts.launch import LIBC

CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
IFF_TUN_NO_PI: Final = 0x1001
"""Bare IP packets, without a header of the device."""
SUBNET: Final = ipaddress.ip_network("10.77.0.0/24")
PACKET_BYTES: Final = 65_536
IPV4: Final = 4
LOST_SECONDS: Final = 10.0
OWN_NAMESPACE: Final = "/proc/thread-self/ns/net"

Way = tuple[str, str]
"""A direction of a link: the name of the sender, and that of the receiver."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    name: str
    address: str
    namespace: int
    device: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that run it on this host."""
        return ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run on this host; what awaits must not be inside, as this thread is there as a whole."""
        back = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            checked(LIBC.setns(self.namespace, CLONE_NEWNET), "setns")
            try:
                yield
            finally:
                checked(LIBC.setns(back, CLONE_NEWNET), "setns")
        finally:
            os.close(back)

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """Open a socket that stays on this host."""
        with self.entered():
            return socket.socket(family, kind, protocol)

    def connector(self, **options: Any) -> aiohttp.TCPConnector:
        """Let an HTTP client of this process be on this host."""
        return aiohttp.TCPConnector(socket_factory=lambda info: self.socket(*info[:3]), **options)


@dataclass
class Network:
    """The links between hosts, all of which are whole at first."""

    hosts: dict[str, Host]
    dice: Random
    passed: Counter[Way] = field(default_factory=Counter)
    lost: Counter[Way] = field(default_factory=Counter)
    _cut: Counter[Way] = field(default_factory=Counter)
    _delays: dict[Way, float] = field(default_factory=dict)
    _losses: dict[Way, float] = field(default_factory=dict)
    _names: dict[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = {socket.inet_aton(host.address): host.name for host in self.hosts.values()}

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    # --- faults ---

    @contextmanager
    def cut_one_way(self, sender: str, *receivers: str) -> Iterator[None]:
        """Lose all packets from the sender to the receivers; those of the other direction still arrive."""
        with self.cut_ways(*((sender, receiver) for receiver in receivers)):
            yield

    @contextmanager
    def cut(self, one: str, *others: str) -> Iterator[None]:
        """Lose all packets between one host and the others."""
        with self.cut_ways(*(way for other in others for way in ((one, other), (other, one)))):
            yield

    @contextmanager
    def cut_ways(self, *ways: Way) -> Iterator[None]:
        """Lose all packets of these directions; at least one must be sent."""
        before = self._lost_of(ways)
        self._cut.update(ways)
        try:
            yield
        finally:
            self._cut.subtract(ways)
        assert self._lost_of(ways) > before, f"no packet met the cut of {ways}, so the test shows nothing"

    def _lost_of(self, ways: Iterable[Way]) -> int:
        return sum(self.lost[way] for way in ways)

    async def loses(self, *ways: Way, packets: int = 1) -> None:
        """Wait until so many more packets of these directions are lost."""
        until = self._lost_of(ways) + packets
        async with asyncio.timeout(LOST_SECONDS):
            while self._lost_of(ways) < until:
                await asyncio.sleep(0.01)

    @contextmanager
    def slow(self, links: Iterable[Way], *, delay_seconds: float, loss: float) -> Iterator[None]:
        """Delay each packet of these links, in both directions, and lose this share of them."""
        ways = [way for one, other in links for way in ((one, other), (other, one))]
        self._delays |= dict.fromkeys(ways, delay_seconds)
        self._losses |= dict.fromkeys(ways, loss)
        try:
            yield
        finally:
            for way in ways:
                del self._delays[way], self._losses[way]

    @contextmanager
    def unreachable(self, sender: str, *receivers: str) -> Iterator[None]:
        """Let the sender have no route to the receivers: its own kernel refuses to send."""
        routes = [f"unreachable {self[receiver].address}/32" for receiver in receivers]
        configure(self[sender], [f"route add {route}" for route in routes])
        try:
            yield
        finally:
            configure(self[sender], [f"route del {route}" for route in routes])

    # --- packets ---

    def receive(self, sender: Host) -> None:
        """Pass on what a host sends."""
        with suppress(BlockingIOError):
            while packet := os.read(sender.device, PACKET_BYTES):
                receiver = self._names.get(packet[16:20]) if packet[0] >> 4 == IPV4 else None
                if receiver is not None:
                    self._pass_on(packet, (sender.name, receiver))

    def _pass_on(self, packet: bytes, way: Way) -> None:
        if self._cut[way] or self.dice.random() < self._losses.get(way, 0):
            self.lost[way] += 1
            return
        self.passed[way] += 1
        device = self[way[1]].device
        if delay := self._delays.get(way):
            asyncio.get_running_loop().call_later(delay, deliver, device, packet)
        else:
            deliver(device, packet)


def deliver(device: int, packet: bytes) -> None:
    """Put a packet into a host; one that is gone, or whose queue is full, loses it."""
    with suppress(OSError):
        os.write(device, packet)


# --- namespaces and devices ---


def checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def make_host(name: str, address: str, stack: ExitStack) -> Host:
    """Make a namespace with a device that has the address; the stack closes both."""
    back = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        checked(LIBC.unshare(CLONE_NEWNET), "unshare")
        try:
            namespace = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, namespace)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, device)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN_NO_PI))
        finally:
            checked(LIBC.setns(back, CLONE_NEWNET), "setns")
    finally:
        os.close(back)
    host = Host(name, address, namespace, device)
    configure(host, ["link set lo up", f"addr add {address}/{SUBNET.prefixlen} dev net0", "link set net0 up"])
    return host


def configure(host: Host, lines: Iterable[str]) -> None:
    """Run lines of iproute2 on a host."""
    with host.entered():
        subprocess.run(("ip", "-batch", "-"), input="\n".join(lines), text=True, check=True, capture_output=True)


def missing() -> str | None:
    """Why this machine cannot have such a network; None if it can."""
    try:
        with ExitStack() as stack:
            _ = make_host("probe", str(SUBNET[1]), stack)
    except OSError as exc:
        return f"no network namespaces or TUN devices here ({exc}); run as root, with iproute2 and /dev/net/tun"
    except subprocess.CalledProcessError as exc:
        return f"ip cannot configure a network namespace here: {exc.stderr.strip()}"
    return None


@contextmanager
def network(*names: str, seed: int = 1) -> Iterator[Network]:
    """Make hosts of these names; this process's event loop passes their packets on."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        hosts = {name: make_host(name, str(SUBNET[number]), stack) for number, name in enumerate(names, 1)}
        net = Network(hosts, Random(seed))
        for host in hosts.values():
            loop.add_reader(host.device, net.receive, host)
            stack.callback(loop.remove_reader, host.device)
        yield net
