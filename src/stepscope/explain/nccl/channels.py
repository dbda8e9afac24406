"""Ranks of one communicator that are connected differently from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.nccl.evidence import SHOWN, more, plural
from stepscope.explain.nccl.groups import Member
from stepscope.records.explanation import Finding, Remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.nccl.groups import Group, Node
    from stepscope.records.explanation import Place
    from stepscope.records.nccl import Link, NcclLog

_Difference = tuple[str, list[Member], bool]  # words, the odd ones, whether it is grave


def unequal_channels(logs: Sequence[NcclLog], groups: list[Group]) -> Finding | None:
    """Ranks of one communicator that are connected differently from the others."""
    del logs
    lines: list[str] = []
    where: list[Place] = []
    grave = False
    for group in groups:
        differences = [*_different_counts(group), *_different_ways(group)]
        for text, odd, serious in differences:
            lines.append(f"{group.words()}: {text}")
            where += [member.place(member.comm.line) for member in odd[:1]]
            grave |= serious
    if not lines:
        return None
    return Finding(
        id="nccl-unequal-channels",
        title="Unequal NCCL channels",
        share=0.0,
        severity="medium" if grave else "low",
        summary="ranks of one communicator are connected differently: the slowest way sets the "
        "pace of all.",
        evidence=(*lines[:SHOWN], *more(len(lines) - SHOWN, "difference")),
        where=tuple(where[:SHOWN]),
        remedies=(
            Remedy(
                id="same-environment",
                summary="start every rank with the same NCCL_* variables, drivers and devices, and "
                "compare `nvidia-smi topo -m` of the machines named here",
            ),
        ),
    )


def _different_counts(group: Group) -> list[_Difference]:
    """Channel counts that NCCL should have agreed on."""
    out: list[_Difference] = []
    for words, field in (
        ("channels for collectives", "channels"),
        ("channels for point to point", "p2p_channels"),
        ("NVLS channels", "nvls_channels"),
    ):
        by_count: dict[object, list[Member]] = {}
        for member in group.members:
            count = getattr(member.comm, field)
            if count is not None:
                by_count.setdefault(count, []).append(member)
        out += _contrast(by_count, words, field == "channels")
    return out


def _different_ways(group: Group) -> list[_Difference]:
    """Networks by rank (those that use one), and ways within a machine by machine."""
    networks: dict[object, list[Member]] = {}
    local: dict[Node, set[str]] = {}
    for member in group.members:
        used = {_network_words(link) for link in member.comm.links if link.family == "NET"}
        if used:
            networks.setdefault(" and ".join(sorted(used)), []).append(member)
        inside = {link.family for link in member.comm.links if link.family in ("P2P", "SHM")}
        local.setdefault(member.node, set()).update(inside)
    machines: dict[object, list[Member]] = {}
    for member in group.members:
        if local[member.node]:
            machines.setdefault(" and ".join(sorted(local[member.node])), []).append(member)
    return [*_contrast(networks, "", True), *_contrast(machines, "inside the machine", False)]


def _network_words(link: Link) -> str:
    return f"NET/{link.network} {'with' if link.gdrdma else 'without'} GPU direct RDMA"


def _contrast(by_value: dict[object, list[Member]], words: str, grave: bool) -> list[_Difference]:
    if len(by_value) < 2:
        return []
    values = sorted(by_value.items(), key=lambda item: -len(item[1]))
    parts = [
        f"{value}{' ' if words else ''}{words if place == 0 else ''}".rstrip()
        + f" on {plural('rank', [m.comm.rank or 0 for m in members])}"
        f" ({members[0].at(members[0].comm.line)})"
        for place, (value, members) in enumerate(values)
    ]
    return [(", ".join(parts[:SHOWN]), values[-1][1], grave)]
