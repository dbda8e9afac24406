"""Ranks that talk over a slower way than they could: sockets, or host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.nccl.evidence import (
    SHOWN,
    chosen_links,
    count_pairs,
    facts,
    link_lines,
    places,
)
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.nccl import SOCKET
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.nccl.groups import Group
    from stepscope.records.explanation import Severity
    from stepscope.records.nccl import NcclLog

_HIDES_ADAPTERS = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_HCA")
_HIDES_P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")


def socket_fallback(logs: Sequence[NcclLog], groups: list[Group]) -> Finding | None:
    """Ranks that talk over TCP where something faster is, or may be, there."""
    slow = chosen_links(groups, lambda link: link.family == "NET" and link.network == SOCKET)
    if not slow:
        return None
    local = [each for each in slow if each[0].within(each[2])]
    evidence = _better_network(logs, groups)
    switches = _switches(logs, _HIDES_P2P if local else _HIDES_ADAPTERS)
    severity: Severity = "high" if local or evidence else "medium" if switches else "low"
    if local:
        summary = "ranks of one machine talk over TCP sockets instead of P2P or shared memory."
    elif evidence:
        summary = "ranks talk over TCP sockets although these machines have a faster network."
    elif switches:
        summary = "ranks talk over TCP sockets, and the environment switches faster ways off."
    else:
        summary = "ranks talk over TCP sockets; NCCL saw no faster network on these machines."
    return Finding(
        id="nccl-socket-fallback",
        title="NCCL over sockets",
        share=0.0,
        severity=severity,
        summary=summary,
        evidence=(*link_lines(local or slow), *evidence, *switches, *_reasons(logs)),
        where=places(local or slow),
        remedies=_local_remedies() if local else _network_remedies(bool(switches)),
    )


def no_p2p(logs: Sequence[NcclLog], groups: list[Group]) -> Finding | None:
    """Ranks of one machine that pass everything through host memory."""
    shared = chosen_links(groups, lambda link: link.family == "SHM")
    if not shared:
        return None
    direct = chosen_links(groups, lambda link: link.family == "P2P")
    switches = _switches(logs, ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"))
    said = facts(logs, "P2P is disabled")
    return Finding(
        id="nccl-no-p2p",
        title="NCCL without P2P",
        share=0.0,
        severity="medium" if switches or said else "low",
        summary=f"{count_pairs(shared)} of {counted(count_pairs([*shared, *direct]), 'pair')} "
        "of ranks on "
        "one machine talk through host memory instead of GPU to GPU.",
        evidence=(*link_lines(shared), *switches, *said),
        where=places(shared),
        remedies=(
            Remedy(id="p2p", summary="unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL where they are set")
            if switches
            else Remedy(
                id="p2p",
                summary="see `nvidia-smi topo -p2p r`: PCIe access control (ACS), a virtual "
                "machine or a container without all GPUs can forbid GPU to GPU access",
            ),
        ),
    )


def _better_network(logs: Sequence[NcclLog], groups: list[Group]) -> list[str]:
    """What shows that these machines have something faster than sockets."""
    lines = []
    for log in logs:
        for process in log.processes:
            if process.adapters:
                listed = ", ".join(process.adapters[:SHOWN])
                lines.append(f"{process.host} has {listed}")
    fast = chosen_links(groups, lambda link: link.family == "NET" and link.network != SOCKET)
    lines += [f"other links use {name}" for name in sorted({link.network for _, _, link in fast})]
    return list(dict.fromkeys(lines))[:SHOWN]


def _switches(logs: Sequence[NcclLog], names: tuple[str, ...]) -> list[str]:
    found = {
        f"{name}={process.settings[name]} is set in the environment of {process.host}"
        for log in logs
        for process in log.processes
        for name in names
        if _switches_off(name, process.settings.get(name))
    }
    return sorted(found)[:SHOWN]


def _switches_off(name: str, value: str | None) -> bool:
    if value is None or (name.endswith("_DISABLE") and value == "0"):
        return False
    return name != "NCCL_NET" or value == SOCKET


def _reasons(logs: Sequence[NcclLog]) -> list[str]:
    return [
        *facts(logs, "NET/IB : No device found"),
        *facts(logs, "Failed to"),
    ][:SHOWN]


def _network_remedies(switched_off: bool) -> tuple[Remedy, ...]:
    unset = Remedy(
        id="unset", summary="unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA where they are set"
    )
    return (
        *((unset,) if switched_off else ()),
        Remedy(
            id="fast-network",
            summary="give the job the fast network: /dev/infiniband, libibverbs and an unlimited "
            "`ulimit -l` inside the container, or the cloud's own NCCL network plugin",
        ),
        Remedy(
            id="faster-sockets",
            summary="where sockets are all there is: NCCL_SOCKET_IFNAME for the fastest interface, "
            "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD for more of it",
        ),
    )


def _local_remedies() -> tuple[Remedy, ...]:
    return (
        Remedy(
            id="one-machine",
            summary="let the ranks of a machine see each other: unset NCCL_P2P_DISABLE and "
            "NCCL_SHM_DISABLE, run containers with --ipc=host and all GPUs, or in one container",
        ),
    )
