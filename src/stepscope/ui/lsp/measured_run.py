"""All that the editor shows of one run: line costs, findings, what-ifs and patches, read
from its folder in a child process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.changes import APPLIED
from stepscope.errors import StepscopeError
from stepscope.fix.named_changes import ChosenChange, load_change
from stepscope.fix.patched_source import patch_source
from stepscope.records.prediction import GpuPrediction
from stepscope.records.script_facts import ScriptFacts
from stepscope.records.source_lines import (
    BatchElsewhere,
    BatchPlace,
    BatchPoint,
    LineCost,
    LineCosts,
    Place,
)
from stepscope.ui.editor.edits import line_changes
from stepscope.ui.tried_remedies import applicable

if TYPE_CHECKING:
    from stepscope.records.explanation import Advice, Finding

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
    from stepscope.ui.api import explain
    from stepscope.ui.editor.batch_size import batch_elsewhere, batch_in_source
    from stepscope.ui.editor.line_costs import line_costs_of
    from stepscope.verify.trials import read_script

    costs = line_costs_of(run)
    explanation = explain(run)
    first = explanation.ranks[0]
    memory = first.memory
    facts = read_script(Path(first.path).parent)
    patches = offer_patches(facts, costs.texts, explanation.findings) if facts else ()
    times = [rank.step_ms for rank in explanation.ranks]
    slowest = max(times, key=lambda one: one.corrected or one.profiled or 0.0)
    text = costs.texts.get(str(script))
    place = batch_in_source(text, costs) if text is not None else None
    return MeasuredRun(
        costs=costs,
        low_ms=slowest.low,
        high_ms=slowest.high,
        findings=tuple(note_finding(one, script, costs, patches) for one in explanation.findings),
        whatifs=whatifs(explanation.advice),
        memory=memory.categories if memory is not None else {},
        peak_bytes=memory.peak_bytes if memory is not None else costs.peak_bytes,
        capacity_bytes=memory.limit_bytes if memory is not None else None,
        batch=samples_of_step(costs, place),
        batch_number=place.value if place is not None else None,
        batch_elsewhere=batch_elsewhere(script, text, costs) if text and place is None else None,
        curve=_curve(run, costs, place) if place is not None else (),
        gpus=step_on_gpus(run),
        patches=patches,
        report=str(run / REPORT),
    )


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
    """Predict other batches; nothing where they cannot be predicted."""
    from stepscope.ui.editor.batch_size import batch_curve

    batches = sorted({max(1, round(place.value * factor)) for factor in _FACTORS})
    samples = samples_of_step(costs, place)
    with contextlib.suppress(StepscopeError):
        return batch_curve(run, batches, batch=place.value, samples=samples)
    return ()


def step_on_gpus(run: Path) -> tuple[GpuPrediction, ...]:
    """Predict the step on other GPUs; nothing where it cannot be moved, as that of a CPU."""
    from stepscope.predict.compare_gpus import compare_gpus, table_gpus
    from stepscope.predict.declaration import Refused
    from stepscope.ui.advice import open_slowest

    with contextlib.suppress(StepscopeError, Refused):
        bench, _, _ = open_slowest(str(run), cache=True)
        return compare_gpus(bench, table_gpus()).gpus
    return ()


# A finding and a what-if as the editor shows them: small enough to pass between processes.

# What of a line's time a finding is about.
_ABOUT: dict[str, Callable[[LineCost], float]] = {
    "data-loading": lambda line: line.other_ms,
    "dominant-kernel": lambda line: line.total_ms - line.other_ms,
}


class FindingNote(msgspec.Struct, frozen=True, kw_only=True):
    """A finding at lines of the measured program."""

    id: str
    title: str
    severity: str
    summary: str
    places: tuple[Place, ...] = ()
    remedies: tuple[str, ...] = ()  # what would help, in words
    try_command: str | None = None


class StepWhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would probably make training faster."""

    label: str
    setting: str  # as `stepscope whatif --set` takes it
    gain: str  # what it buys, with its interval


def note_finding(
    finding: Finding, script: Path, costs: LineCosts, patches: Sequence[OfferedPatch]
) -> FindingNote:
    """Place it where it says; else where its remedy's patch begins; else at the line that costs
    most of what it is about; else at the script's first line."""
    said = [Place(file=one.file, line=one.line) for one in finding.where if one.file in costs.texts]
    patched = next(_patched(finding, costs, patches), None)
    first = Place(file=str(script), line=1)
    places = list(dict.fromkeys(said)) or [patched or _costliest(finding, costs) or first]
    return FindingNote(
        id=finding.id,
        title=finding.title,
        severity=finding.severity,
        summary=finding.summary,
        places=tuple(places),
        remedies=tuple(remedy.summary for remedy in finding.remedies),
        try_command=finding.try_command,
    )


def _patched(
    finding: Finding, costs: LineCosts, patches: Sequence[OfferedPatch]
) -> Iterator[Place]:
    for patch in patches:
        if finding.id not in patch.findings:
            continue
        for file, after in patch.after.items():
            changes = line_changes(costs.texts[file], after)
            if changes:
                yield Place(file=file, line=changes[-1].start + 1)  # imports come first


def _costliest(finding: Finding, costs: LineCosts) -> Place | None:
    """Return the line; None for a finding about no line, and where no line has most of it."""
    amount = _ABOUT.get(finding.id)
    if amount is None:
        return None
    line = max(costs.lines, key=amount, default=None)
    if line is None or amount(line) < finding.share * costs.step_ms / 2:
        return None
    return Place(file=line.file, line=line.line)


def whatifs(advice: Sequence[Advice]) -> tuple[StepWhatIf, ...]:
    """Those that are predicted to help, the best first."""
    return tuple(
        StepWhatIf(
            label=one.label,
            setting=one.setting,
            gain=" ".join(filter(None, one.gain.words())),
        )
        for one in advice
        if one.verdict == "faster"
    )


# Remedies as patches of the measured program: what a code action applies or takes back.


class OfferedPatch(msgspec.Struct, frozen=True, kw_only=True):
    """One remedy. `after` holds the files that it changes, as they are with it."""

    id: str  # as `stepscope tune --only` takes it, with its value
    action: str
    effect: str  # on the numbers of the training
    after: dict[str, str]
    findings: tuple[str, ...] = ()  # ids of those that offer it
    saved_ms: float | None = None  # predicted or measured, per step


def offer_patches(
    facts: ScriptFacts, texts: Mapping[str, str], findings: Iterable[Finding]
) -> tuple[OfferedPatch, ...]:
    """Return every remedy that fits and can be made by editing these files; the findings' own
    first.
    """
    findings = list(findings)
    asked = [name for finding in findings for name in applicable(finding)]
    offers = []
    for name in dict.fromkeys((*asked, *APPLIED)):
        offer = _offer(load_change(name), facts, texts, findings)
        if offer is not None:
            offers.append(offer)
    return tuple(offers)


def _offer(
    change: ChosenChange, facts: ScriptFacts, texts: Mapping[str, str], findings: list[Finding]
) -> OfferedPatch | None:
    fitting = (value for value in change.values_for(facts) if change.fix.fits(facts, value) is None)
    value = next(fitting, None)
    if value is None:
        return None

    def read(file: str) -> bytes | None:
        text = texts.get(file, texts.get(str(Path(file).resolve())))
        return text.encode() if text is not None else None

    chosen = replace(change, value=value)
    patched = patch_source(facts, [chosen], read)
    if not patched.after or patched.by_hand or patched.variables:
        return None  # a half of a remedy is none
    offering = [finding for finding in findings if change.id in applicable(finding)]
    return OfferedPatch(
        id=str(chosen),
        action=change.change.action,
        effect=change.application.effect.value,
        after={
            (file if file in texts else str(Path(file).resolve())): text.decode()
            for file, text in patched.after.items()
        },
        findings=tuple(finding.id for finding in offering),
        saved_ms=_saved_ms(change.id, offering),
    )


def _saved_ms(remedy: str, findings: Iterable[Finding]) -> float | None:
    """Return what `tune` measured, else what is predicted where the interval is a saving."""
    for finding in findings:
        for one in finding.remedies:
            if one.id == remedy and one.measured_ms is not None:
                return one.measured_ms
            if one.id == remedy and one.gain is not None and one.gain.is_sure:
                return None if one.gain.changes_samples else one.gain.saved_ms
    return None


def main() -> None:
    """Read RUN for SCRIPT, in a child of the server: {"run": ...} or {"failed": "why"} on stdout.

    Whatever the libraries print goes to standard error.
    """
    answer = os.dup(1)
    os.dup2(2, 1)
    body: dict[str, object] = {}
    try:
        body["run"] = read_measured_run(Path(sys.argv[1]), Path(sys.argv[2]))
    except StepscopeError as error:
        body["failed"] = str(error)
    except Exception as error:
        body["failed"] = f"a defect in stepscope: {type(error).__name__}: {error}"
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(msgspec.json.encode(body))


if __name__ == "__main__":
    main()
