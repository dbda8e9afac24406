"""The cost of each line as a run folder shows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.explain.lines import cost_lines
from stepscope.trace.read import read_trace
from stepscope.trace.regular_files import MissingFileError, read_whole
from stepscope.ui.advice import find_slowest
from stepscope.ui.api import explain

if TYPE_CHECKING:
    from stepscope.explain.lines import KeptBytes
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.line_costs import LineCosts

TRACE, MEMORY, SOURCES = "trace-lines.json.gz", "memory.json", "lines.json"
_MOST_SOURCES = 256 << 20
_T = TypeVar("_T")


class _KeptLine(msgspec.Struct, frozen=True):
    file: str
    line: int
    bytes: int


class _MemoryFile(msgspec.Struct, frozen=True):
    activations_by_line: list[_KeptLine] | None = None


class _Sources(msgspec.Struct, frozen=True):
    texts: dict[str, str] = {}


def line_costs_of(run: Path) -> LineCosts:
    """Of the rank that decides the step. Raises NotCapturedError for a run without `--lines`."""
    if not any(run.glob(f"rank-*/{TRACE}")):
        raise NotCapturedError(
            f"{run} has no costs of lines: record with `stepscope run --lines`, and train at least "
            "25 steps"
        )
    explanation = explain(run)
    rank = _rank_with_lines(explanation.ranks, find_slowest(explanation))
    folder = Path(rank.path).parent
    step_ms = rank.budget.step_ms
    if step_ms is None:
        raise NotCapturedError(f"{run} does not show how long a step is")
    memory = _decoded(folder / MEMORY, _MemoryFile)
    costs = cost_lines(read_trace(folder / TRACE), step_ms, _kept(memory))
    sources = _decoded(folder / SOURCES, _Sources)
    largest = rank.memory.largest_batch if rank.memory is not None else None
    return replace(
        costs,
        verdict=explanation.verdict,
        peak_bytes=rank.memory.peak_bytes if rank.memory is not None else None,
        device=rank.device or rank.kind,
        run=str(run.absolute()),
        batch=largest.batch if largest is not None else None,
        # Passes that share a batch count once: the loader gave one.
        batches_per_step=(largest.batches_per_step if largest is not None else None) or 1,
        texts=sources.texts if sources is not None else {},
    )


def _rank_with_lines(
    ranks: tuple[RankExplanation, ...], slowest: RankExplanation
) -> RankExplanation:
    """The slowest, or the first that recorded lines."""
    for rank in (slowest, *ranks):
        if (Path(rank.path).parent / TRACE).is_file():
            return rank
    raise NotCapturedError(f"no rank next to {slowest.path} recorded lines of code")


def _kept(memory: _MemoryFile | None) -> KeptBytes | None:
    """None where the memory step did not watch lines."""
    if memory is None or memory.activations_by_line is None:
        return None
    kept: KeptBytes = {}
    for one in memory.activations_by_line:
        kept[one.file, one.line] = kept.get((one.file, one.line), 0) + one.bytes
    return kept


def _decoded(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(read_whole(path, _MOST_SOURCES), type=kind)
    except MissingFileError:
        return None
    except msgspec.MsgspecError as error:
        raise UnreadableInputError(f"{path} is damaged: {error}") from None
