"""All that the editor shows of one run, read from its folder in a child process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.records.gpu_comparison import GpuPrediction  # noqa: TC001  (for msgspec)
from stepscope.records.line_costs import (  # noqa: TC001  (for msgspec)
    BatchElsewhere,
    BatchPoint,
    LineCosts,
)
from stepscope.ui.lsp.finding_note import FindingNote, StepWhatIf, note_finding, whatifs
from stepscope.ui.lsp.offered_patch import OfferedPatch, offer_patches

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation
    from stepscope.records.line_costs import BatchPlace

REPORT = "report.html"
# Of the batch as it is: what the draggable bars reach, and a few points between.
_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run; None means not known."""

    costs: LineCosts
    low_ms: float | None = None  # 95% interval of the step
    high_ms: float | None = None
    findings: tuple[FindingNote, ...] = ()
    whatifs: tuple[StepWhatIf, ...] = ()
    memory: dict[str, int | None] = {}  # bytes at the peak, by category
    peak_bytes: int | None = None
    capacity_bytes: int | None = None  # of the device
    batch: int | None = None  # samples of a step
    batch_number: int | None = None  # the number in the source that set it
    batch_elsewhere: BatchElsewhere | None = None  # the number, if another file holds it
    curve: tuple[BatchPoint, ...] = ()
    gpus: tuple[GpuPrediction, ...] = ()  # the shortest step first; empty for a CPU
    patches: tuple[OfferedPatch, ...] = ()  # empty if the run did not write script.json
    report: str | None = None  # where it is, or will be written


def read_measured_run(run: Path, script: Path) -> MeasuredRun:
    """Raises StepscopeError if the run does not tell what lines cost."""
    from stepscope.trace.script_file import read_script
    from stepscope.ui.api import explain
    from stepscope.ui.editor.measured import line_costs_of

    costs = line_costs_of(run)
    explanation = explain(run)
    first = explanation.ranks[0]
    memory = first.memory
    facts = read_script(Path(first.path).parent)
    patches = offer_patches(facts, costs.texts, explanation.findings) if facts else ()
    low_ms, high_ms = _interval(explanation)
    place = _batch_place(script, costs)
    return MeasuredRun(
        costs=costs,
        low_ms=low_ms,
        high_ms=high_ms,
        findings=tuple(note_finding(one, script, costs, patches) for one in explanation.findings),
        whatifs=whatifs(explanation.advice),
        memory=memory.categories if memory is not None else {},
        peak_bytes=memory.peak_bytes if memory is not None else costs.peak_bytes,
        capacity_bytes=memory.limit_bytes if memory is not None else None,
        batch=samples_of_step(costs, place),
        batch_number=place.value if place is not None else None,
        batch_elsewhere=_batch_elsewhere(script, costs) if place is None else None,
        curve=_curve(run, costs, place) if place is not None else (),
        gpus=step_on_gpus(run),
        patches=patches,
        report=str(run / REPORT),
    )


def _interval(explanation: Explanation) -> tuple[float | None, float | None]:
    times = [rank.step_ms for rank in explanation.ranks]
    slowest = max(times, key=lambda one: one.corrected or one.profiled or 0.0)
    return slowest.low, slowest.high


def _batch_place(script: Path, costs: LineCosts) -> BatchPlace | None:
    from stepscope.ui.editor.batch_place import batch_in_source

    text = costs.texts.get(str(script))
    return batch_in_source(text, costs) if text is not None else None


def _batch_elsewhere(script: Path, costs: LineCosts) -> BatchElsewhere | None:
    from stepscope.ui.editor.batch_elsewhere import batch_elsewhere

    text = costs.texts.get(str(script))
    return batch_elsewhere(script, text, costs) if text is not None else None


def samples_of_step(costs: LineCosts, place: BatchPlace | None) -> int | None:
    """The measured batch is the first dimension of the inputs. A script may multiply its number to
    get it, or divide its number among the batches of a step; if neither can be, samples are another
    dimension, and the number says how many."""
    seen, batches = costs.batch, costs.batches_per_step
    if place is None or (seen is not None and seen % place.value == 0):
        return seen * batches if seen is not None else None
    is_divided = seen is not None and seen * batches == place.value
    return place.value if is_divided else place.value * batches


def _curve(run: Path, costs: LineCosts, place: BatchPlace) -> tuple[BatchPoint, ...]:
    """Empty where other batches cannot be predicted."""
    from stepscope.ui.editor.batch_curve import batch_curve

    batches = sorted({max(1, round(place.value * factor)) for factor in _FACTORS})
    samples = samples_of_step(costs, place)
    with contextlib.suppress(StepscopeError):
        return batch_curve(run, batches, batch=place.value, samples=samples)
    return ()


def step_on_gpus(run: Path) -> tuple[GpuPrediction, ...]:
    """Empty where the step cannot be moved to another GPU, as that of a CPU."""
    from stepscope.predict.compare_gpus import compare_gpus, table_gpus
    from stepscope.predict.outcome import Refused
    from stepscope.ui.slowest_bench import open_slowest

    with contextlib.suppress(StepscopeError, Refused):
        bench, _, _ = open_slowest(str(run), cache=True)
        return compare_gpus(bench, table_gpus()).gpus
    return ()
