"""What a report takes from a rank while its trace is in memory: its picture, and the advice."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stepscope.explain.explain_file import Visit
    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import RankExplanation
    from stepscope.ui.advice import RankAdvice
    from stepscope.ui.html.picture import RankPicture

# Each drawn rank adds up to half a megabyte to the report; the tables of all ranks are there.
DRAWN_RANKS = 16


class RankLook(NamedTuple):
    """One rank's visit; what was not asked for is None."""

    picture: RankPicture | None
    advice: RankAdvice | None


def look_at_rank(
    analysis: RankAnalysis, rank: RankExplanation, *, draw: bool, advise: bool = False
) -> RankLook:
    """Draw the rank's picture, predict what changes would save, or both."""
    picture = advice = None
    if draw:
        from stepscope.explain.compiled import open_regions
        from stepscope.ui.html.picture import draw_rank

        picture = draw_rank(analysis.trace, rank, analysis.compute_once(open_regions))
    if advise:
        from stepscope.ui.advice import advise_rank

        advice = advise_rank(analysis, rank, draw=draw)
    return RankLook(picture, advice)


def choose_look(traces: JobTraces, *, draw: bool) -> Visit[RankLook] | None:
    """A single rank gets its advice at once. Which of several needs advice shows only when all are
    explained, so these are drawn and nothing else."""
    if traces.is_single:
        return partial(look_at_rank, draw=draw, advise=True)
    return partial(look_at_rank, draw=True) if draw else None
