"""A pane: one section of the report. `panes/<id>.py` declares it, `page/<id>.html.j2` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.explain.untimed_rank import is_untimed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.explanation import Explanation, RankExplanation
    from stepscope.records.quality import Note
    from stepscope.trace.tune_files import FoundTune
    from stepscope.ui.html.whatif_grid import WhatIfGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """What every pane may draw from."""

    explanation: Explanation
    ranks: Sequence[RankExplanation]  # those shown in detail, in the order of the rank picker
    whatif: WhatIfGrid | None = None
    tune: FoundTune | None = None  # of the same command

    @property
    def is_timed(self) -> bool:
        """False where memory was captured and nothing else."""
        return not all(is_untimed(rank) for rank in self.explanation.ranks)

    @property
    def notes(self) -> tuple[Note, ...]:
        """About the traces; those about a whole job stand in its own pane."""
        return () if self.explanation.job else self.explanation.quality


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """`page/<id>.js` and `page/<id>.css`, where there are any, are its script and style."""

    id: str  # also of its section in the page
    title: str  # of its link in the header; without one it has none
    order: int  # panes stand in this order
    view: Callable[[ReportData], object]  # the template's `view`; None leaves the pane out


def rank_label(rank: RankExplanation) -> str:
    return "This trace" if rank.rank is None else rank.called.capitalize()
