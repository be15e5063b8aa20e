"""The start of a detached mesh: on this machine, or on hosts that a launcher gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from monarch._core.text.durations import parse_duration
from monarch._procs.agent.detached_records import check_name, find
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.holding.held import HeldLaunch, hold
from monarch._procs.launch.holding.messages import HoldOrder
from monarch._procs.launch.local import HostAgent
from monarch._procs.os.posix import memfd
from monarch._procs.rank.output import read_tail
from monarch._session.detached.meshes import DetachedMesh, connect, need_program, say_nothing
from monarch._session.launching.attachment import LOOPBACK
from monarch._session.launching.waiting import Tell, check_counts, wait_for_hosts
from monarch._session.local_agent import LATER, PRELOAD
from monarch._wire.keys import KeyPair
from monarch.exceptions import ArgumentError, DetachedMeshInUseError, SpawnError

_LEAST = 1.0
"""The shortest lease, in seconds."""
_BEGIN_S = 60.0
"""Seconds for an agent of this machine to start."""


def keep(
    name: str,
    duration: float | str,
    *,
    on: str = "",
    hosts: int = 0,
    options: Mapping[str, Any] | None = None,
    silence: float | None = None,
    spare: int = 0,
    tell: Tell | None = None,
) -> DetachedMesh:
    """Start a host on this machine whose processes outlive this program, or get such hosts from a launcher.

    Args:
        name: the name to attach it by; a Python identifier.
        duration: its lease while no program has it attached: seconds, or a string such as ``2h``.
        on: a launcher, such as ``slurm`` or ``ssh:node[1-4]``, as for ``%mesh up --on``; empty for this machine. A
            process on this machine then holds the hosts, until the mesh ends or its lease does.
        hosts: how many hosts of the launcher; 0 for all that it names.
        options: the options of the launcher, by name.
        silence: seconds without a heartbeat after which a host counts as lost; None for the default.
        spare: how many of the hosts the caller keeps to replace others; refused if that leaves none.
        tell: called with a line at each step of the wait for the hosts, and whether it matters after it.

    Raises:
        DetachedMeshInUseError: a mesh of this name exists.
        ArgumentError: the name, the duration or an argument of the launcher is invalid.
        SpawnError: it could not be started; a host that has failed is named.
    """
    check_name(name)
    seconds = parse_duration(duration) if isinstance(duration, str) else float(duration)
    if not _LEAST <= seconds <= 366 * 86400:
        raise ArgumentError(f"duration: expected {_LEAST:g}s to 366d, got {duration!r}")
    node = need_program().node
    if silence is not None:
        node.hosts.lease = silence
    keys = KeyPair.new()
    public, secret = keys.public.decode(), keys.secret.decode()
    config = AgentConfig("", "", "", 0, 0, PRELOAD, owner_public=public, keys=(public, secret), later=LATER)
    config.name, config.seconds, config.lease = name, seconds, node.hosts.lease
    if not on:
        if hosts or options:
            raise ArgumentError("hosts and options need a launcher; pass one, as in on='slurm'")
        return _keep_here(config)
    launch = _hold(HoldOrder(name, seconds, on, hosts, dict(options or {}), config, os.getpid()))
    try:
        check_counts(launch.expected, None, spare)
        launch.joined, _ = wait_for_hosts(need_program(), launch, None, None, tell or say_nothing)
        detached, _ = connect(find(name), launch, ends=True)
        if detached.missing:
            raise SpawnError("; ".join(detached.problems))
        detached.listen()
    except BaseException:
        launch.end()
        raise
    detached.watch_hosts(tell or say_nothing)
    return detached


def _hold(order: HoldOrder) -> HeldLaunch:
    try:
        msgspec.msgpack.encode(order.options)
    except TypeError as error:
        raise ArgumentError(f"options: expected numbers, strings, lists and dicts: {error}") from error
    return hold(order)


def _keep_here(config: AgentConfig) -> DetachedMesh:
    """Start a host on this machine."""
    config.listen = f"tcp://{LOOPBACK}"
    errors = memfd("detached-stderr")
    try:
        agent = HostAgent(config, errors, announces=True, module="monarch._procs.agent.detached", stays=True)
        try:
            line = agent.first_line(_BEGIN_S)
            if line is None:
                agent.abandon()
                raise SpawnError(
                    f"the agent of the detached mesh {config.name!r} did not start within {_BEGIN_S:g} s, and was "
                    f"killed; try again when the machine is less busy"
                )
        finally:
            agent.part()
        if not line:
            output = read_tail(errors, 4096).data.decode(errors="replace").strip().splitlines()
            raise SpawnError(
                f"the agent of the detached mesh {config.name!r} ended during "
                f"startup{': ' + output[-1] if output else ''}"
            )
    finally:
        os.close(errors)
    answer = msgspec.json.decode(line)
    if isinstance(answer[0], bool):
        in_use, why = answer
        raise DetachedMeshInUseError(why) if in_use else SpawnError(why)
    record = find(config.name)
    try:
        detached, _ = connect(record)
        detached.listen()
    except BaseException:
        # Nobody else knows it yet.
        if record.alive():
            os.kill(record.pid, signal.SIGTERM)
        raise
    return detached
