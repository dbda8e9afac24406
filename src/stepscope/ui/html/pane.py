"""Declare a pane, one section of the report, and write the data blocks that its script reads.

`panes/<id>.py` declares it, `page/<id>.html.j2` prints it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.explain.incomplete_ranks import is_untimed
from stepscope.records.explanation import Explanation, RankExplanation
from stepscope.records.quality import Note

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.trace.run_folder.related_runs import FoundTune
    from stepscope.ui.html.picture import RankPicture
    from stepscope.ui.html.whatif_grid import WhatIfGrid

    Column = NDArray[np.int64] | NDArray[np.uint8]


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


# A rank's picture and tables as text for a page: columns, deflated, in base64.
#
#     u32 length of the JSON head | JSON head | columns, in the order the head lists them
#
# Columns hold unsigned integers. Their bytes are transposed (all lowest bytes first), because the
# high bytes of times and codes are nearly constant: that halves the deflated size.


def encode_rank(picture: RankPicture | None, tables: list[dict[str, Any]]) -> str:
    """One rank's data block. A rank without a picture still has its tables."""
    head: dict[str, Any] = {"tables": tables}
    if picture is None:
        return encode_block(head, {})
    lane_facts = ("name", "group", "work", "first_row", "rows", "events")
    flames = {"host": picture.host_flame, "device": picture.device_flame}
    head["picture"] = {
        "span_ns": picture.span_ns,
        "strings": picture.strings,
        "lanes": [{name: getattr(lane, name) for name in lane_facts} for lane in picture.lanes],
        "steps": [[step.name, step.start_ns, step.dur_ns] for step in picture.steps],
        "left_out": picture.left_out,
        "flames_left_out": [flame.left_out for flame in flames.values()],
    }
    events, gaps = picture.events, picture.gaps
    columns: dict[str, Column] = {
        "row_start": events.row_start,
        "start_delta": zigzag(_deltas(events.start_ns, events.row_start)),
        "dur": events.dur_ns,
        "name": events.name,
        "kind": events.kind,
        # Launches come in order, so differences between neighbours are small.
        "link": zigzag(np.diff(events.link + 1, prepend=0)),
        "gap_start": gaps.start_ns,
        "gap_dur": gaps.dur_ns,
        "gap_cause": gaps.cause,
        "gap_frame": gaps.frame + 1,
    }
    for side, flame in flames.items():
        columns |= {
            f"{side}_parent": flame.parent + 1,
            f"{side}_name": flame.name,
            f"{side}_kind": flame.kind,
            f"{side}_count": flame.count,
            f"{side}_total": flame.total_ns,
            f"{side}_self": flame.self_ns,
        }
    return encode_block(head, columns)


def encode_block(head: dict[str, Any], columns: dict[str, Column], *, level: int = 9) -> str:
    """A head and its columns as one data block; `level` is how hard it is deflated."""
    listed = [[name, *_shape(column)] for name, column in columns.items()]
    head = {**head, "columns": listed}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    parts = [len(text).to_bytes(4, "little"), text]
    parts += [transpose(column) for column in columns.values()]
    return base64.b64encode(zlib.compress(b"".join(parts), level)).decode("ascii")


def transpose(column: Column) -> bytes:
    """The column's bytes, all lowest bytes first; as many as its largest value needs."""
    _, width = _shape(column)
    little = np.ascontiguousarray(column, dtype="<u8")
    planes = little.view(np.uint8).reshape(-1, 8)[:, :width]
    return planes.T.tobytes()


def _shape(column: Column) -> tuple[int, int]:
    largest = int(column.max(initial=0))
    return len(column), (largest.bit_length() + 7) // 8


def _deltas(start: NDArray[np.int64], row_start: NDArray[np.int64]) -> NDArray[np.int64]:
    """Time since the row's previous event; a row's first event counts from the picture's zero."""
    delta = np.diff(start, prepend=0)
    first = row_start[:-1][np.diff(row_start) > 0]
    delta[first] = start[first]
    return delta


def zigzag(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Signed to unsigned with small magnitudes staying small: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return np.where(value >= 0, 2 * value, -2 * value - 1)
