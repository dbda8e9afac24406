"""The rank that decides a job's step, ready for what-ifs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.explain.explain_job import JobTraces
from stepscope.ui.advice import find_slowest
from stepscope.ui.whatif import make_bench

if TYPE_CHECKING:
    from stepscope.predict.whatif import Bench
    from stepscope.records.explanation import RankExplanation
    from stepscope.trace.files import Progress


def open_slowest(
    *paths: str, cache: bool, progress: Progress | None = None
) -> tuple[Bench, RankExplanation, str]:
    """Also a word about which rank that is."""
    traces = JobTraces(paths, cache=cache)
    chosen, job = str(traces.files[0]), None
    about = Path(chosen).name
    if len(traces.files) > 1:
        explanation, _ = traces.explain(progress=progress)
        slowest = find_slowest(explanation)
        chosen, job = slowest.path, explanation.job
        about = f"{slowest.called} of {len(explanation.ranks)}, the slowest"
    rank, benches = traces.visit_here(chosen, partial(make_bench, job=job), progress)
    if not benches:
        raise NotCapturedError(f"{chosen} is a memory snapshot: it holds no step to change")
    return benches[0], rank, about
