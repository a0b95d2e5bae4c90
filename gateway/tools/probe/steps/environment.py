"""Checks the rest of a configuration from this machine: keys, listeners, peers, issuer."""

import asyncio
import errno
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from yarl import URL

from gateway import world
from gateway.auth.jwks import fetch
from gateway.cluster.membership import resolve
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.peer_errors import PeerFailed, PeerRefused
from gateway.config import Config, InForce, cautions, contexts, digest, redacted_url, split_address, validity
from gateway.config.parsing.state_keys import KEY_BYTES
from gateway.config.rules import WILDCARDS
from gateway.http.server.listen_errors import explained
from gateway.http.upstream_client import Bounds, Client
from gateway.protocol.errors import IF_HUNG, OwnerStalled, clean, clock_fix
from gateway.runtime.tasks import Tasks
from gateway.seal.keyring import Keys, key_id
from gateway.seal.peer_messages import PeerSealer
from gateway.tools.probe.report.text import TextReport
from gateway.tools.probe.steps.context import Notes
from gateway.tools.probe.steps.requests import NO_REPLY, ask, http_client

_OURS: Final = b"mcp_gateway_"
"""Every metric of a gateway begins with this."""
_SHOWN: Final = 8


async def look_around(config: Config, secrets: Iterable[str], text: TextReport) -> Notes:
    """Run every check; problems are part of the result, and nothing is raised."""
    text.begin("The configuration, on this machine")
    notes = Notes(secrets, text)
    notes.ok("configuration", f"valid, digest {digest(config)}, {len(config.routes)} route(s)")
    for caution in cautions(config, validity(config)):
        key, _, says = caution.partition(" ")
        why, _, fix = says.partition("; ")
        notes.warn("caution", key, f"It {why}.", f"{fix[:1].upper()}{fix[1:]}.")
    if keys := config.state.raw_keys():
        notes.ok("state keys", f"{len(keys)}: {', '.join(map(key_id, keys))}; the first one seals")
    else:
        notes.warn(
            "state keys",
            "none: each process makes its own at start",
            "A restart invalidates every requestState that clients still hold, and no other process can open them.",
            "Make a key with `mrtr-gateway keygen`, and set state.keys or state.keys_file.",
        )
    async with http_client(Bounds(config.limits, config.timeouts)) as (client, tasks):
        await _look_at_listeners(notes, config, client)
        await _look_at_peers(notes, config, tasks)
    await _look_at_issuer(notes, config)
    return notes


async def _look_at_listeners(notes: Notes, config: Config, client: Client) -> None:
    runs = False
    if config.admin is not None:
        host, port = split_address(config.admin)
        url = URL.build(scheme="http", host=WILDCARDS.get(host, host), port=port, path="/metrics")
        with suppress(*NO_REPLY):
            reply = await ask(client, "GET", url, {}, seconds=client.timeouts.connect_seconds)
            runs = reply.status == 200 and _OURS in reply.body
    listeners = (("listen", config.listen), ("admin", config.admin), ("replica.listen", config.replica.listen))
    for name, address in listeners:
        if address is None:
            continue
        try:
            with explained(config, address):
                world.listening(*split_address(address)).close()
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE and runs:
                notes.ok(name, f"{address} is in use by a running gateway")
            else:
                found, _, fix = str(exc.strerror).partition("; ")
                _ = notes.failed(name, found, "The gateway cannot start.", f"{fix[:1].upper()}{fix[1:]}.")
        else:
            notes.ok(name, f"{address} is free")


async def _look_at_peers(notes: Notes, config: Config, tasks: Tasks) -> None:
    replica = config.replica
    if replica.peers_dns is not None:
        host, port = split_address(replica.peers_dns)
        try:
            async with asyncio.timeout(config.timeouts.connect_seconds):
                found = await resolve(host, port)
        except (OSError, TimeoutError) as exc:
            why = clean(getattr(exc, "strerror", None) or "no answer in time", 80)
            notes.warn(
                "peers",
                f"{host} has no address ({why})",
                "A replica that receives a retry cannot forward it to the replica that holds the call.",
                "Check the name of the headless service, and that it publishes pods that are not ready "
                "(publishNotReadyAddresses). Run this command where the gateway runs.",
            )
            return
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        notes.ok("peers", f"{host} resolves to {', '.join(found[:_SHOWN])}{more}")
        return
    own = replica.id or world.host_name()
    # Without state.keys, which is a warning above, no other process has this one's key.
    sealer = PeerSealer(InForce(Keys(config.state.raw_keys() or (world.random_bytes(KEY_BYTES),))))
    connections = PeerConnections(InForce(config.timeouts), None, own, sealer, tasks)
    for name, address in sorted(replica.peers.items()):
        if name != own:
            await _ask_peer(notes, connections, name, address)
    connections.close()


async def _ask_peer(notes: Notes, connections: PeerConnections, name: str, address: str) -> None:
    """Ask a peer for its id, as a replica does."""
    fix = "Check that it runs, its replica.listen and the network in between."
    try:
        told = await connections.ask_name(address, "")
    except OwnerStalled as exc:
        found = exc.why
        if isinstance(exc, PeerRefused) and exc.ahead_seconds is not None:
            fix = f"{clock_fix(name, exc.ahead_seconds)}."
        elif exc.fix != OwnerStalled.fix:
            fix = f"{exc.fix[:1].upper()}{exc.fix[1:]}."
    except PeerFailed as exc:
        found = "does not answer as a replica"
        if isinstance(exc.__cause__, TimeoutError):
            found, fix = "does not answer in time", f"{fix} {IF_HUNG}."
    else:
        if told == name:
            notes.ok("peers", f"{name} at {address} answers")
            return
        found = "refuses connections"
        if told is not None:
            found, fix = f"is {told}", "Correct replica.peers, or the replica.id of that replica."
    notes.warn("peers", f"{name} at {address} {found}", "Calls that it holds cannot continue from here.", fix)


async def _look_at_issuer(notes: Notes, config: Config) -> None:
    principal = config.principal
    if principal.source != "jwt" or principal.jwks_url is None:
        return
    try:
        async with http_client(Bounds(config.limits, config.timeouts, contexts(config).issuer)) as (client, _):
            keys = await fetch(client, principal.jwks_url)
    except (*NO_REPLY, ValueError) as exc:
        _ = notes.failed(
            "issuer",
            clean(str(exc) or "no answer", 200),
            "Without the issuer's keys no token can be verified: every call gets HTTP 503.",
            "Check principal.jwks_url and principal.jwks_ca_file, and that this machine can reach the issuer.",
        )
    else:
        notes.ok("issuer", f"serves {len(keys)} key(s) at {clean(redacted_url(principal.jwks_url), 200)}")
