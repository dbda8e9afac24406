"""How a finding declares itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from stepscope.explain.findings.evidence import severity as severity_of
from stepscope.records.explanation import Finding, Place, Remedy, Severity, ShareOf

__all__ = ["Finding", "FindingRule", "Scope"]

Scope = Literal["rank", "job", "nccl", "together"]


class FindingRule(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `find` takes the evidence of its scope (evidence.py) and returns the finding,
    or None when the step does not show it."""

    id: str  # its file's name with dashes, and its page in docs/findings
    scope: Scope = "rank"
    title: str
    find: Callable[[Any], Finding | None]

    def finding(
        self,
        *,
        share: float,
        summary: str,
        evidence: tuple[str, ...],
        severity: Severity | None = None,
        title: str = "",
        where: tuple[Place, ...] = (),
        remedies: tuple[Remedy, ...] = (),
        rank: int | None = None,
        of: ShareOf = "step",
    ) -> Finding:
        """A finding of this rule, as severe as its share unless `severity` says otherwise; `title`
        replaces the rule's own where it depends on the case."""
        return Finding(
            id=self.id,
            title=title or self.title,
            share=share,
            severity=severity or severity_of(share),
            summary=summary,
            evidence=evidence,
            where=where,
            remedies=remedies,
            rank=rank,
            of=of,
        )
