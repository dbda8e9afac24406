"""Ranks on one machine that exchange data through host memory."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import NcclEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.nccl_groups import (
    count_pairs,
    describe_links,
    first_places,
    list_switches,
    quote_facts,
    select_links,
)
from stepscope.text.words import counted


def find(evidence: NcclEvidence) -> Finding | None:
    """Medium where somebody forbids P2P; NCCL may also have good reasons of its own."""
    logs, groups = evidence
    through_host = select_links(groups, lambda link: link.family == "SHM")
    if not through_host:
        return None
    direct = select_links(groups, lambda link: link.family == "P2P")
    switches = list_switches(logs, ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"))
    quotes = quote_facts(logs, "P2P is disabled")
    pairs = counted(count_pairs([*through_host, *direct]), "pair")
    return RULE.finding(
        share=0.0,
        severity="medium" if switches or quotes else "low",
        summary=f"{count_pairs(through_host)} of {pairs} of ranks on one machine exchange data "
        "through CPU memory instead of directly between GPUs.",
        evidence=(*describe_links(through_host), *switches, *quotes),
        where=first_places(through_host),
        remedies=(
            remedies.P2P.offer(
                "Unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL where they are set"
                if switches
                else "Run `nvidia-smi topo -p2p r`. PCIe access control (ACS), a virtual machine "
                "or a container without all GPUs can block GPU-to-GPU access"
            ),
        ),
    )


RULE = FindingRule(
    id="nccl-no-p2p", scope="nccl", title="No direct GPU-to-GPU transfers", find=find
)
