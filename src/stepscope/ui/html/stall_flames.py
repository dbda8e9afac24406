"""Why steps stall: for each cause, stacks in stalled steps against those in typical ones.

A flame graph's widths are the time in a stalled step; stall_flames.js colours it by how much more
that is than in a typical one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.whole_run.stall_lines import compare_lines, merge_differences
from stepscope.explain.whole_run.stall_stacks import FEWEST_SAMPLES, is_library_frame
from stepscope.records.figures import interval, milliseconds, percent
from stepscope.records.words import counted
from stepscope.ui.html.payload import encode_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepscope.records.place import Place
    from stepscope.records.stack_samples import LineDifference, StackDifference
    from stepscope.records.whole_run import RankRun, StallCause
    from stepscope.ui.html.payload import Column
    from stepscope.ui.html.run_tables import StallRow

_ROOT = "a stalled step"
_MOST_LINES = 2  # that the sentence names
_LEAST_LEFT_OUT = 0.005  # of the time
NOT_SAMPLED = (
    f"Not sampled: fewer than {FEWEST_SAMPLES} stacks were seen in steps that stalled for this. "
    "Rare or short stalls need a longer run."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReason:
    """What the page says about one cause, above its flame graph."""

    cause: str
    label: str
    words: str
    about: str  # what the graph rests on
    left_out: str
    sampled: bool  # otherwise there is no graph


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceTree:
    """Stacks as columns, a parent before its children; times of one step, in ns."""

    parent: list[int]  # -1 for the root
    frame: list[Place | None]  # None for the root
    stalled_ns: list[int]
    typical_ns: list[int]
    self_ns: list[int]  # in stalled steps, with no frame inside
    samples: list[int]  # in stalled steps


def stall_reasons(
    ranks: Sequence[RankRun], rows: Sequence[StallRow]
) -> tuple[list[StallReason], str]:
    """One for each row of the table, and the data block of their flame graphs (empty: none)."""
    merged = {row.cause: _difference(ranks, row.cause) for row in rows}
    several = len({rank.rank for rank in ranks}) > 1
    reasons = [_reason(row, merged[row.cause], several=several) for row in rows]
    known = {cause: difference for cause, difference in merged.items() if difference is not None}
    return reasons, _encode(known) if known else ""


def build_tree(difference: StackDifference) -> DifferenceTree:
    """Merge stacks that begin alike. The root is the whole step: what is left out stays blank."""
    tree = DifferenceTree(
        parent=[-1], frame=[None], stalled_ns=[0], typical_ns=[0], self_ns=[0], samples=[0]
    )
    places: dict[tuple[int, Place], int] = {}
    for stack in difference.stacks:
        stalled = round(stack.stalled * difference.stalled_ms * 1e6)
        typical = round(stack.typical * difference.typical_ms * 1e6)
        samples = round(stack.stalled * difference.stalled_samples)
        path = _path(tree, places, stack.frames)
        for node in path:
            tree.stalled_ns[node] += stalled
            tree.typical_ns[node] += typical
            tree.samples[node] += samples
        tree.self_ns[path[-1]] += stalled
    tree.stalled_ns[0] = max(tree.stalled_ns[0], round(difference.stalled_ms * 1e6))
    tree.typical_ns[0] = max(tree.typical_ns[0], round(difference.typical_ms * 1e6))
    tree.samples[0] = difference.stalled_samples
    return tree


def _path(
    tree: DifferenceTree, places: dict[tuple[int, Place], int], frames: tuple[Place, ...]
) -> list[int]:
    """The nodes of a stack from the root on; those that are new are added."""
    path = [0]
    for frame in frames:
        key = (path[-1], frame)
        if key not in places:
            places[key] = len(tree.parent)
            tree.parent.append(path[-1])
            tree.frame.append(frame)
            for column in (tree.stalled_ns, tree.typical_ns, tree.self_ns, tree.samples):
                column.append(0)
        path.append(places[key])
    return path


def _difference(ranks: Sequence[RankRun], cause: str) -> StackDifference | None:
    """Over all ranks."""
    known = [one for rank in ranks for one in rank.stacks if one.cause == cause]
    return merge_differences(known) if known else None


# In words.


def _reason(row: StallRow, difference: StackDifference | None, *, several: bool) -> StallReason:
    words, about, left_out = NOT_SAMPLED, "", ""
    if difference is not None:
        words = describe_lines(compare_lines(difference))
        about = (
            f"{counted(difference.stalled_samples, 'sample')} in "
            f"{counted(difference.stalled_steps, 'stalled step')}, "
            f"{counted(difference.typical_samples, 'sample')} in typical ones"
            f"{'; all ranks together' if several else ''}"
        )
        rest = 1 - sum(stack.stalled for stack in difference.stacks)
        if rest > _LEAST_LEFT_OUT:
            left_out = f"Stacks of {percent(rest)} of the time are left out: they differ least."
    return StallReason(
        cause=row.cause,
        label=row.label,
        words=words,
        about=about,
        left_out=left_out,
        sampled=difference is not None,
    )


def describe_lines(lines: Sequence[LineDifference]) -> str:
    if not lines:
        return "No line of code runs clearly longer in stalled steps than in typical ones."
    first, *others = lines[:_MOST_LINES]
    also = "".join(f", and {_line_words(line)} for {_times(line)} more" for line in others)
    return (
        f"In stalled steps {_line_words(first)} runs for {_times(first)} more than in typical "
        f"ones{also}."
    )


def _times(line: LineDifference) -> str:
    return f"{milliseconds(line.more_ms)} ({interval(line.low_ms, line.high_ms)})"


def _line_words(line: LineDifference) -> str:
    place = line.place
    name = place.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{place.line} {place.function}".strip()


# For the page.


def _encode(differences: Mapping[StallCause, StackDifference]) -> str:
    names: dict[str, int] = {}
    columns: dict[str, Column] = {}
    for cause, difference in differences.items():
        columns |= _columns(cause, build_tree(difference), names)
    return encode_block({"strings": list(names)}, columns)


def _columns(cause: str, tree: DifferenceTree, names: dict[str, int]) -> dict[str, Column]:
    """As FlameTree reads them; `kind` is 1 for the user's own code."""
    name = [names.setdefault(_frame_name(frame), len(names)) for frame in tree.frame]
    own = [frame is not None and not is_library_frame(frame) for frame in tree.frame]
    lists = {
        "parent": [parent + 1 for parent in tree.parent],
        "name": name,
        "kind": own,
        "count": tree.samples,
        "total": tree.stalled_ns,
        "self": tree.self_ns,
        "typical": tree.typical_ns,
    }
    return {f"{cause}_{key}": np.array(values, np.int64) for key, values in lists.items()}


def _frame_name(frame: Place | None) -> str:
    return _ROOT if frame is None else f"{frame.file}({frame.line}): {frame.function}"
