"""Ranks of which only a part is known: a folder without a trace, summed up where it is read;
a trace without steps, explained as a stretch of time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError
from stepscope.explain.job.rank_part import MANY_RANKS, calls_of_run, empty_part
from stepscope.explain.kernels import no_launches
from stepscope.explain.whole_run.rank_run import explain_run, sum_up_run
from stepscope.records.explanation import (
    Budget,
    Explanation,
    Finding,
    Headline,
    Idle,
    RankExplanation,
    Steps,
    StepTime,
    Timeline,
)
from stepscope.records.job import RankPart
from stepscope.records.quality import Note
from stepscope.records.rank import RanksWithoutTrace, RankWithoutTrace
from stepscope.records.run import RankRun
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted, number_spans, sentence
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.rank_facts import CapturedChoice, CapturedLayout, folder_rank
from stepscope.trace.run_folder.rank_folder import read_untraced_folder
from stepscope.trace.run_folder.run_times import read_run_times
from stepscope.trace.run_folder.step_files import read_step_columns

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.trace.discover import TraceFile

# What comes back is bounded, however long the run was (see whole_run/run_calls.py).

_RANK_FOLDER = re.compile(r"rank-\d+(\.\d+)?")
_ALIKE = ("group", "sequence", "number", "steps")
_RULES = {
    "auto": "traces are recorded on at most 64 ranks, spread evenly over the hosts; --ranks "
    "chooses others",
    "one-per-host": "--ranks one-per-host",
    "listed": "--ranks lists the others",
}


def summarise_rank(
    folder: TraceFile, same_rank: Mapping[str, tuple[Path, ...]] | None = None
) -> RankWithoutTrace | Exception | None:
    """None for a folder without steps. Returns errors, so that one bad folder costs no other.

    `same_rank` has the other folders of a rank, if they are elsewhere (trace/discover.py).
    """
    try:
        return _summarise(Path(str(folder)), (same_rank or {}).get(str(folder), ()))
    except UnreadableInputError as error:
        return error
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return StepscopeError(
            f"{folder}: a defect in stepscope: {type(error).__name__}: {error}; "
            "set STEPSCOPE_DEBUG=1 to see where"
        )


def _summarise(folder: Path, same_rank: tuple[Path, ...]) -> RankWithoutTrace | None:
    oddities = Oddities("steps.jsonl")
    steps = read_step_columns(folder, oddities)
    if steps is None or not len(steps):
        return None
    captured = read_untraced_folder(folder)
    facts = captured.facts
    number = facts.rank if isinstance(facts.rank, int) else folder_rank(folder) or 0
    world_size = facts.world_size if isinstance(facts.world_size, int) else None
    times = read_run_times(folder, steps, same_rank)
    if (world_size or 0) > MANY_RANKS:
        run, mean_ms = sum_up_run(steps, rank=number, times=times)
    else:
        run = explain_run(steps, rank=number, times=times)
        mean_ms = run.times.mean_ms if run.times else None
    layout = facts.communication  # DDP runs its collectives beside the backward pass
    calls = calls_of_run(
        captured.collectives,
        steps,
        asynchronous=isinstance(layout, CapturedLayout) and bool(layout.ddp),
        world_size=world_size,
    )
    return RankWithoutTrace(
        path=str(folder),
        part=empty_part(
            rank=number,
            rounds=captured.rounds,
            host=facts.host if isinstance(facts.host, str) else None,
            world_size=world_size,
            run=calls,
            links=captured.links,
        ),
        run=run,
        mean_ms=mean_ms,
        rule=facts.trace.ranks
        if isinstance(facts.trace, CapturedChoice) and not facts.trace.chosen
        else None,
        notes=(*oddities.notes, *captured.notes),
    )


def is_rank_folder(file: TraceFile) -> bool:
    """Whether this stands for a rank without a trace; the folder may be on another host."""
    named = isinstance(file, Path) and _RANK_FOLDER.fullmatch(file.name) is not None
    return named and isinstance(file, Path) and not file.is_file()


def gather_untraced(
    outcomes: Iterable[RankWithoutTrace | Exception | None],
) -> tuple[list[RankWithoutTrace], list[Exception]]:
    """The ranks and the failures. Columns that all ranks have alike are kept once."""
    ranks, failures = [], []
    shared = SharedColumns()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            failures.append(outcome)
        elif outcome is not None:
            ranks.append(replace(outcome, part=shared.share(outcome.part)))
    return ranks, failures


class SharedColumns:
    """Keeps equal columns once: ranks of one job make the same calls in the same steps."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def share(self, part: RankPart) -> RankPart:
        run = part.run
        if run is not None:
            run = replace(
                run,
                groups=self._known.setdefault(repr(run.groups).encode(), run.groups),
                **{name: self._once(getattr(run, name)) for name in _ALIKE},
            )
        return empty_part(
            rank=part.rank,
            rounds=part.rounds,
            host=part.host,
            world_size=part.world_size,
            run=run,
            links=part.links,
        )

    def _once(self, column: NDArray[Any]) -> NDArray[Any]:
        from hashlib import blake2b

        name = blake2b(column.tobytes(), digest_size=16).digest() + column.dtype.str.encode()
        kept: NDArray[Any] = self._known.setdefault(name, column)
        return kept


class SplitRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that is explained, and the runs of earlier ones and of other processes."""

    current: list[int]  # places in the list of traced ranks
    untraced: list[RankWithoutTrace]  # ranks of the same attempt
    others: list[RankRun]


def split_attempts(
    traced: Sequence[RankExplanation], untraced: Sequence[RankWithoutTrace]
) -> SplitRanks:
    """The last attempt with a trace is explained. A process without a trace is a rank of it when it
    took part in the job under a number of its own."""
    runs = [rank.run for rank in traced if rank.run]
    last = max((run.attempt for run in runs), default=1)
    current = [i for i, rank in enumerate(traced) if not rank.run or rank.run.attempt == last]
    taken = {_number(traced[place]) for place in current}
    peers: dict[int, RankWithoutTrace] = {}
    others = [run for run in runs if run.attempt < last]
    for rank in untraced:
        alone = (rank.part.world_size or 1) < 2
        if alone or rank.run.attempt != last or rank.rank in taken or rank.rank in peers:
            others.append(rank.run)
        else:
            peers[rank.rank] = rank
    return SplitRanks(current=current, untraced=list(peers.values()), others=others)


def _number(rank: RankExplanation) -> int | None:
    return rank.rank if rank.rank is not None else folder_rank(Path(rank.path).parent)


def notes_on_untraced(split: SplitRanks, traced: int) -> list[Note]:
    """How many ranks were traced, and what could not be read of the others."""
    described = describe_untraced(split.untraced, traced)
    if described is None:
        return []
    first: dict[str, Note] = {}
    for rank in split.untraced:
        for note in rank.notes:
            detail = f"rank {rank.rank}: {note.detail}"
            first.setdefault(note.id, Note(id=note.id, detail=detail, count=note.count))
    return [Note(id="sampled-ranks", detail=described.why, count=described.count), *first.values()]


def describe_untraced(ranks: Sequence[RankWithoutTrace], traced: int) -> RanksWithoutTrace | None:
    """None where every rank has a trace."""
    if not ranks:
        return None
    rules = [rank.rule for rank in ranks if rank.rule is not None]
    chosen = _RULES.get(rules[0], _RULES["auto"]) if rules else ""
    failed = len(ranks) - len(rules)
    lost = f"{counted(failed, 'trace')} could not be recorded" if failed else ""
    have = f"{traced:,} of {counted(traced + len(ranks), 'rank')} were traced"
    return RanksWithoutTrace(
        count=len(ranks),
        ranks=tuple(number_spans(rank.rank for rank in ranks)),
        why=f"{have}: {'; '.join(filter(None, (chosen, lost)))}",
    )


# A rank of which no step, timeline or work is known: a memory snapshot, or a run of which only the
# parameter server's events were kept.

MEMORY_ONLY, SERVER_ONLY = "memory-only", "server-only"  # the notes that say so
_TABLES = ("kernels", "operators", "modules", "lines", "copies", "syncs", "collectives")


def untimed_rank(**known: Any) -> RankExplanation:
    """`known` has at least path, kind, events, findings and quality, which says what is known."""
    absent: dict[str, Any] = dict.fromkeys(("rank", "world_size", "device", "gaps"))
    empty: dict[str, Any] = dict.fromkeys(_TABLES, ())
    return RankExplanation(
        timeline=Timeline(**dict.fromkeys(Timeline.__struct_fields__, 0)),
        idle=Idle(**dict.fromkeys(Idle.__struct_fields__, 0)),
        steps=Steps(source="window", steps=(), cycles_ns=(), window_start_ns=0, window_end_ns=0),
        step_ms=StepTime(profiled=None),
        budget=Budget(step_ms=0.0, parts=(), basis="window"),
        launches=no_launches(),
        part=empty_part(rank=0),
        strategies=(),
        **absent,
        **empty,
        **known,
    )


def is_untimed(rank: RankExplanation) -> bool:
    """Whether nothing is known about the time of this rank's steps."""
    return any(note.id in (MEMORY_ONLY, SERVER_ONLY) for note in rank.quality)


def is_server_only(rank: RankExplanation) -> bool:
    """Whether only what a parameter server recorded is known."""
    return any(note.id == SERVER_ONLY for note in rank.quality)


# A trace without steps, explained as a stretch of time: no step's length, nothing to predict.

MARK_STEPS = (
    "Mark the steps: call prof.step() after each of them, or record them with "
    "`stepscope run -- python train.py`"
)
_OF_STEP_MS = re.compile(r"of the ([\d,.]+ \w+) step")


def refuse_span(analysis: RankAnalysis) -> None:
    """NotCapturedError where no step was found: there is none to predict."""
    if analysis.steps.is_span and analysis.run is None:
        raise NotCapturedError(
            f"{analysis.trace.path} has no step marks and repeats nothing, so there is no step to "
            f"predict: {MARK_STEPS.partition(': ')[2]}"
        )


def covers_span(explanation: Explanation) -> bool:
    """Whether no rank's trace shows a step."""
    return all(
        rank.steps.is_span and rank.run is None and not is_untimed(rank)
        for rank in explanation.ranks
    )


def tell_span(explanation: Explanation) -> Explanation:
    """The same without a word about a step, if no trace shows one."""
    if not covers_span(explanation) or not any(rank.events for rank in explanation.ranks):
        return explanation
    rank = max(explanation.ranks, key=lambda rank: rank.timeline.span_ns)
    evidence = [line for finding in explanation.findings[:1] for line in finding.evidence[:1]]
    return replace(
        explanation,
        verdict=f"No training steps found: {_what_it_covers(rank)}",
        why=sentence(_of_time(evidence[0])) if evidence else "",
        next=MARK_STEPS,
        headline=Headline(finding=explanation.findings[0].id),
        findings=tuple(map(_of_span, explanation.findings)),
    )


def _what_it_covers(rank: RankExplanation) -> str:
    timeline = rank.timeline
    busy = 1 - timeline.idle_ns / timeline.span_ns if timeline.span_ns else 0.0
    who = "operators run" if rank.kind == "cpu" else "the GPU works"
    return (
        f"The trace has no step marks. It covers {duration(timeline.span_ns)}, and "
        f"{who} for {percent(busy)} of that."
    )


def _of_span(finding: Finding) -> Finding:
    """Remedies change steps: a start-up is no step."""
    return replace(
        finding,
        summary=_of_time(finding.summary),
        evidence=tuple(map(_of_time, finding.evidence)),
        remedies=(),
        try_command=None,
        of="trace" if finding.of == "step" else finding.of,
    )


def _of_time(text: str) -> str:
    text = _OF_STEP_MS.sub(r"of \1", text)
    return text.replace("of the step", "of the trace")
