"""Write a rank's trace with our tracks: its own text unchanged, ours at the front of its list."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from stepscope.errors import NotCapturedError, UsageError
from stepscope.trace.insert_events import EventList
from stepscope.ui.perfetto.events import track_events
from stepscope.ui.perfetto.tracks import make_tracks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import Explanation, RankExplanation

_FORMAT = "kineto"
_BLOCK_BYTES = 1 << 20
_GZIP_LEVEL = 1


def write_perfetto(
    traces: JobTraces, explanation: Explanation, target: Path, *, ranks: Sequence[RankExplanation]
) -> list[Path]:
    """One file per rank: `target` itself for one rank, else with the rank in its name."""
    targets = [target] if len(ranks) == 1 else [_of_rank(target, rank) for rank in ranks]
    written: list[Path] = []
    for rank, path in zip(ranks, targets, strict=True):
        visit = partial(_write_rank, explanation=explanation, target=path)
        written += traces.visit_here(rank.path, visit).results
    if not written:
        raise NotCapturedError("--perfetto: no rank has a trace of PyTorch's profiler")
    return written


def _of_rank(target: Path, rank: RankExplanation) -> Path:
    """trace.json.gz -> trace-rank-3.json.gz."""
    stem, dot, suffix = target.name.partition(".")
    return target.with_name(f"{stem}-{rank.called.replace(' ', '-')}{dot}{suffix}")


def _write_rank(
    analysis: RankAnalysis, rank: RankExplanation, *, explanation: Explanation, target: Path
) -> Path:
    trace = analysis.trace
    if trace.format != _FORMAT:
        raise UsageError(
            f"--perfetto needs a trace that PyTorch's profiler wrote: {trace.path} is of "
            f"{trace.format}"
        )
    if target.exists() and target.samefile(trace.path):
        raise UsageError(f"--perfetto {target} is the trace itself: name another file")
    source = EventList(Path(trace.path))
    notes = {note.id for note in trace.quality}
    base_ns = 0 if "base-ignored" in notes else source.base_ns
    events = track_events(make_tracks(analysis, rank, explanation), trace, base_ns)
    with _writing(target) as file:
        for block in _blocks(source.with_events(events, ends_early="truncated" in notes)):
            file.write(block)
    return target


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Many small events are written at once."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _BLOCK_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[IO[bytes]]:
    """Whole or not at all; compressed if its name ends with .gz."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with contextlib.ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(unfinished.open("wb"))
            if target.suffix == ".gz":
                from isal import igzip

                file = stack.enter_context(
                    igzip.IGzipFile(mode="wb", fileobj=file, compresslevel=_GZIP_LEVEL, mtime=0)
                )
            yield file
        unfinished.replace(target)
    except OSError as error:
        raise UsageError(f"--perfetto {target} could not be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
