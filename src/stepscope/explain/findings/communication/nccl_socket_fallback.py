"""Ranks that talk over TCP sockets where a faster connection exists, or may exist."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import NcclEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.nccl_groups import (
    SHOWN,
    NcclGroup,
    describe_links,
    first_places,
    list_switches,
    quote_facts,
    select_links,
)
from stepscope.records.explanation import Remedy, Severity
from stepscope.records.nccl import SOCKET, NcclLog

_HIDES_ADAPTERS = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_HCA")
_HIDES_P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")


def find(evidence: NcclEvidence) -> Finding | None:
    """High where a faster connection is certain, medium where a variable may hide one."""
    logs, groups = evidence
    sockets = select_links(groups, lambda link: link.family == "NET" and link.network == SOCKET)
    if not sockets:
        return None
    within_machine = [chosen for chosen in sockets if chosen[0].within(chosen[2])]
    faster = _list_faster_networks(logs, groups)
    switches = list_switches(logs, _HIDES_P2P if within_machine else _HIDES_ADAPTERS)
    severity: Severity = "high" if within_machine or faster else "medium" if switches else "low"
    if within_machine:
        summary = "Ranks on one machine talk over TCP sockets instead of P2P or shared memory."
    elif faster:
        summary = "Ranks talk over TCP sockets although their machines have a faster network."
    elif switches:
        summary = (
            "Ranks talk over TCP sockets because environment variables switch faster connections "
            "off."
        )
    else:
        summary = (
            "Ranks talk over TCP sockets because NCCL found no faster network on these machines."
        )
    return RULE.finding(
        share=0.0,
        severity=severity,
        summary=summary,
        evidence=(
            *describe_links(within_machine or sockets),
            *faster,
            *switches,
            *_quote_reasons(logs),
        ),
        where=first_places(within_machine or sockets),
        remedies=_offer(bool(within_machine), bool(switches)),
    )


def _list_faster_networks(logs: Sequence[NcclLog], groups: list[NcclGroup]) -> list[str]:
    """What shows that these machines have something faster than sockets."""
    lines = []
    for log in logs:
        for process in log.processes:
            if process.adapters:
                adapters = ", ".join(process.adapters[:SHOWN])
                lines.append(f"{process.host} has {adapters}")
    fast = select_links(groups, lambda link: link.family == "NET" and link.network != SOCKET)
    lines += [f"other links use {name}" for name in sorted({link.network for _, _, link in fast})]
    return list(dict.fromkeys(lines))[:SHOWN]


def _quote_reasons(logs: Sequence[NcclLog]) -> list[str]:
    return [*quote_facts(logs, "NET/IB : No device found"), *quote_facts(logs, "Failed to")][:SHOWN]


def _offer(within_machine: bool, switched_off: bool) -> tuple[Remedy, ...]:
    if within_machine:
        return (remedies.ONE_MACHINE.offer(),)
    network = (remedies.FAST_NETWORK.offer(), remedies.FASTER_SOCKETS.offer())
    if not switched_off:
        return network
    unset = remedies.UNSET_NCCL_VARIABLES.offer()
    return (unset, *network)


RULE = FindingRule(
    id="nccl-socket-fallback", scope="nccl", title="NCCL uses TCP sockets", find=find
)
