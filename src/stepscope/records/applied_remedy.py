"""What became of a remedy that `run --with` or a trial asked for: in one rank, and in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.records.failed_command import FailedCommand  # noqa: TC001  (decoded at run time)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# unknown: no rank tells, because none trained or rank.json was not written
Outcome = Literal["applied", "refused", "nothing to change", "unknown"]


class AppliedRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of rank.json's remedies."""

    id: str = ""  # as it was asked for: bf16, bucket-mb=50
    did: list[str] = []  # each thing that it changed
    refused: str | None = None  # why it was not applied

    @property
    def outcome(self) -> Outcome:
        if self.refused:
            return "refused"
        return "applied" if self.did else "nothing to change"


class RunRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy in all ranks that were read. If it was applied in some of them, it was applied."""

    id: str
    outcome: Outcome
    detail: str = ""  # what it did, or why it was refused
    applied_ranks: int = 0
    ranks: int = 0

    @property
    def words(self) -> str:
        """bf16; tf32 was refused: it needs a CUDA device."""
        if self.outcome == "applied":
            some = self.applied_ranks < self.ranks
            return f"{self.id} in {self.applied_ranks} of {self.ranks} ranks" if some else self.id
        return f"{self.id} {_UNAPPLIED[self.outcome].format(self.detail)}"


_UNAPPLIED: dict[Outcome, str] = {
    "refused": "was refused: {}",
    "nothing to change": "found nothing to change",
    "unknown": "(no rank tells whether it was applied)",
}


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was started: its command, the folder it was started in, and its remedies; and how
    it ended, if it failed."""

    command: tuple[str, ...] = ()
    folder: str | None = None  # the working folder
    remedies: tuple[RunRemedy, ...] = ()
    failed: FailedCommand | None = None


def join_ranks(asked: Sequence[str], by_rank: Iterable[Sequence[AppliedRemedy]]) -> list[RunRemedy]:
    """`asked` are the remedies of run.json; `by_rank` those of each rank.json."""
    ranks = [list(remedies) for remedies in by_rank]
    told = (remedy.id for remedies in ranks for remedy in remedies)
    names = dict.fromkeys((*asked, *told))
    return [
        _join(name, [each for remedies in ranks for each in remedies if each.id == name])
        for name in names
    ]


def _join(name: str, by_rank: list[AppliedRemedy]) -> RunRemedy:
    """The outcome that is furthest from what was asked for is told only where none was applied."""
    if not by_rank:
        return RunRemedy(id=name, outcome="unknown")
    ordered = sorted(by_rank, key=lambda remedy: _FIRST.index(remedy.outcome))
    first = ordered[0]
    return RunRemedy(
        id=name,
        outcome=first.outcome,
        detail=first.refused or "; ".join(first.did),
        applied_ranks=sum(remedy.outcome == "applied" for remedy in by_rank),
        ranks=len(by_rank),
    )


_FIRST: tuple[Outcome, ...] = ("applied", "refused", "nothing to change", "unknown")
