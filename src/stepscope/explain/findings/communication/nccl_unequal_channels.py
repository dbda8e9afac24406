"""Ranks of one communicator that are connected differently from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import NcclEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.nccl_groups import SHOWN, Member, count_rest, named_ranges
from stepscope.records import remedies
from stepscope.records.explanation import Place

if TYPE_CHECKING:
    from stepscope.explain.nccl_groups import NcclGroup, Node

_Difference = tuple[str, list[Member], bool]  # words, the ranks that differ, whether it slows all


def find(evidence: NcclEvidence) -> Finding | None:
    """Different channel counts, networks, or connections inside machines."""
    lines: list[str] = []
    where: list[Place] = []
    slows_all = False
    for group in evidence.groups:
        for text, odd_members, slows in [*_compare_counts(group), *_compare_transports(group)]:
            lines.append(f"{group.describe()}: {text}")
            where += [member.place(member.comm.line) for member in odd_members[:1]]
            slows_all |= slows
    if not lines:
        return None
    return RULE.finding(
        share=0.0,
        severity="medium" if slows_all else "low",
        summary="Ranks of one communicator are connected differently. The slowest connection sets "
        "the pace for all.",
        evidence=(*lines[:SHOWN], *count_rest(len(lines) - SHOWN, "more difference")),
        where=tuple(where[:SHOWN]),
        remedies=(remedies.SAME_ENVIRONMENT.offer(),),
    )


def _compare_counts(group: NcclGroup) -> list[_Difference]:
    """Channel counts that NCCL should have agreed on."""
    differences: list[_Difference] = []
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
        differences += _contrast(by_count, words, field == "channels")
    return differences


def _compare_transports(group: NcclGroup) -> list[_Difference]:
    """Networks of the ranks that use one, and the connections inside each machine."""
    networks: dict[object, list[Member]] = {}
    local: dict[Node, set[str]] = {}
    for member in group.members:
        used = {
            f"NET/{link.network} {'with' if link.gdrdma else 'without'} GPU direct RDMA"
            for link in member.comm.links
            if link.family == "NET"
        }
        if used:
            networks.setdefault(" and ".join(sorted(used)), []).append(member)
        inside = {link.family for link in member.comm.links if link.family in ("P2P", "SHM")}
        local.setdefault(member.node, set()).update(inside)
    machines: dict[object, list[Member]] = {}
    for member in group.members:
        if local[member.node]:
            machines.setdefault(" and ".join(sorted(local[member.node])), []).append(member)
    return [*_contrast(networks, "", True), *_contrast(machines, "inside the machine", False)]


def _contrast(by_value: dict[object, list[Member]], words: str, slows: bool) -> list[_Difference]:
    """Nothing where all members have the same value."""
    if len(by_value) < 2:
        return []
    values = sorted(by_value.items(), key=lambda item: -len(item[1]))
    parts = [
        f"{value}{' ' if words else ''}{words if place == 0 else ''}".rstrip()
        + f" on {named_ranges('rank', [m.comm.rank or 0 for m in members])}"
        f" ({members[0].at(members[0].comm.line)})"
        for place, (value, members) in enumerate(values)
    ]
    return [(", ".join(parts[:SHOWN]), values[-1][1], slows)]


RULE = FindingRule(
    id="nccl-unequal-channels", scope="nccl", title="Ranks are connected differently", find=find
)
