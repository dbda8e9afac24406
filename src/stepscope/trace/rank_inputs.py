"""Read everything that is known about one rank: its trace and the files that capture wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.rank_inputs import MemoryInputs, RankInputs
from stepscope.trace.layout import SIDE_FILES
from stepscope.trace.read import read_trace
from stepscope.trace.regular_files import may_exist

if TYPE_CHECKING:
    from stepscope.records.job import RankFolder
    from stepscope.records.profile import Profile
    from stepscope.records.quality import Note
    from stepscope.records.step_columns import StepColumns
    from stepscope.records.trace import Trace
    from stepscope.trace.files import Progress
    from stepscope.trace.rank_facts import RankFacts

_FIRST_ENDS, _LAST_ENDS = 10, 100  # see explain/memory/growth.py


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one job are read."""

    cache: bool = True
    memory_limit: int | None = None  # bytes that the training may use on each device
    same_rank: dict[str, tuple[Path, ...]] = {}  # see JobFolders


AS_USUAL = ReadOptions()


def read_rank_inputs(
    path: str | Path,
    options: ReadOptions = AS_USUAL,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> RankInputs:
    """Read the trace at `path` and what lies next to it. Raises UnreadableInputError.

    `name` is what the user calls the file, when it was fetched from elsewhere.
    """
    path = Path(path)
    trace = read_trace(path, cache=options.cache, progress=progress)
    trace = replace(trace, path=name or str(path))
    if any(may_exist(path.parent / file) for file in SIDE_FILES):
        return _read_captured_files(path, trace, options)
    limit = MemoryInputs(limit_bytes=options.memory_limit)
    return RankInputs(trace=trace, memory=limit)


def _read_captured_files(path: Path, trace: Trace, options: ReadOptions) -> RankInputs:
    """The readers of these files are loaded here: most bare traces need none of them."""
    from stepscope.trace.captures_file import read_captures
    from stepscope.trace.compiler_file import read_compiler_record
    from stepscope.trace.decode import Oddities
    from stepscope.trace.measured_steps import STEPS
    from stepscope.trace.rank_folder import read_rank_folder
    from stepscope.trace.run_times import read_run_times
    from stepscope.trace.similar_runs import find_similar_runs
    from stepscope.trace.stack_samples import read_stack_samples
    from stepscope.trace.step_files import read_step_columns

    folder = read_rank_folder(path)
    if folder is not None:
        folder = replace(folder, similar=find_similar_runs(path.parent))
    oddities = Oddities(STEPS)
    steps = read_step_columns(path.parent, oddities)
    samples, sample_notes = read_stack_samples(path.parent)
    compiler, compiler_notes = read_compiler_record(path.parent)
    captures, capture_notes = read_captures(path.parent)
    facts = _read_rank_facts(path.parent)
    others = (*oddities.notes, *sample_notes, *compiler_notes, *capture_notes)
    return RankInputs(
        trace=trace,
        steps=steps,
        times=read_run_times(path.parent, steps, options.same_rank.get(str(path.parent), ())),
        folder=folder,
        host_steps=tuple(facts.host_steps or ()),
        optimizer_lines=tuple(facts.optimizer_lines or ()),
        memory=_read_memory(path.parent, steps, others, options.memory_limit),
        samples=samples,
        compiler=compiler,
        captures=captures,
        calibrations=_find_calibrations(trace, folder),
    )


def _read_rank_facts(folder: Path) -> RankFacts:
    from stepscope.trace.decode import Oddities
    from stepscope.trace.rank_facts import RANK, decode_facts

    return decode_facts(folder, Oddities(RANK))


def _read_memory(
    folder: Path, steps: StepColumns | None, others: tuple[Note, ...], limit_bytes: int | None
) -> MemoryInputs:
    from stepscope.trace.memory_file import read_captured, read_saving

    captured, notes = read_captured(folder)
    saving, about_saving = read_saving(folder)
    return MemoryInputs(
        captured=captured,
        saving=saving,
        step_bytes=_sizes_at_ends(steps),
        limit_bytes=limit_bytes,
        notes=(*notes, *about_saving, *others),
    )


def _sizes_at_ends(steps: StepColumns | None) -> tuple[tuple[int, int], ...]:
    """Of the first steps and the last ones; a long run has millions in between."""
    if steps is None or steps.allocated_bytes is None:
        return ()
    places = np.flatnonzero(steps.allocated_bytes >= 0)
    if len(places) > _FIRST_ENDS + _LAST_ENDS:
        places = np.concatenate((places[:_FIRST_ENDS], places[-_LAST_ENDS:]))
    return tuple(
        zip(steps.number[places].tolist(), steps.allocated_bytes[places].tolist(), strict=True)
    )


def _find_calibrations(trace: Trace, folder: RankFolder | None) -> tuple[Profile, ...]:
    """A bare trace does not say which machine it was recorded on."""
    if folder is None or folder.host is None:
        return ()
    from stepscope.trace.profiles import find_calibrations

    return find_calibrations(folder.host, trace.kind)
