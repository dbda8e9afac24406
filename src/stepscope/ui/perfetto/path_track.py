"""The device's critical path as slices: kernels, and what the host did where it was late."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.device_path import device_path
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest
from stepscope.ui.perfetto.events import Slice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.explain.device_path import DevicePiece
    from stepscope.explain.rank_analysis import RankAnalysis

_WORDS = {"queue": "queued on the device", "launch": "launch", "sync": "CPU returns from a wait"}
BETWEEN_OPERATORS = "CPU: Python between operators"


class PathTrack:
    """One rank's path; empty where the CPU is the device."""

    def __init__(self, analysis: RankAnalysis) -> None:
        self._trace, self._work = analysis.trace, analysis.work
        self._pieces = device_path(analysis)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def slices(self) -> Iterator[Slice]:
        for piece in self._pieces:
            if piece.kind == "host":
                yield from self._host(piece)
            else:
                yield self._slice(piece)

    def _slice(self, piece: DevicePiece) -> Slice:
        trace = self._trace
        if piece.kind == "device":
            name = trace.strings[trace.device.name[piece.row]]
            return Slice(name, piece.start_ns, piece.end_ns, {})
        args = {"call": trace.strings[trace.host.name[piece.row]]} if piece.row >= 0 else {}
        return Slice(_WORDS[piece.kind], piece.start_ns, piece.end_ns, args)

    def _host(self, piece: DevicePiece) -> Iterator[Slice]:
        """The host's time up to a launch: operators, and Python between them."""
        starts, ends, rows = self._operators
        first = int(np.searchsorted(ends, piece.start_ns, side="right"))
        last = int(np.searchsorted(starts, piece.end_ns, side="left"))
        time = piece.start_ns
        for place in range(first, last):
            begins = max(time, int(starts[place]))
            stops = min(int(ends[place]), piece.end_ns)
            if begins > time:
                yield Slice(BETWEEN_OPERATORS, time, begins, {})
            name = self._trace.strings[self._trace.host.name[rows[place]]]
            if stops > begins:
                yield Slice(f"host: {name}", begins, stops, {})
            time = max(time, stops)
        if piece.end_ns > time:
            yield Slice(BETWEEN_OPERATORS, time, piece.end_ns, {})

    @cached_property
    def _operators(
        self,
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
        """Outermost operators of the threads that feed the device, one after the other: where two
        threads overlap, the earlier one counts to its end."""
        host = self._trace.host
        operator = (host.kind == HostKind.OPERATOR) & self._work.feeds(host.thread)
        above = np.where(host.parent >= 0, nearest(host, operator)[np.maximum(host.parent, 0)], -1)
        rows = np.flatnonzero(operator & (above < 0))
        rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
        ends = np.maximum.accumulate(host.start_ns[rows] + host.dur_ns[rows])
        starts = np.maximum(host.start_ns[rows], np.append(host.start_ns[rows[:1]], ends[:-1]))
        keep = ends > starts
        return starts[keep], ends[keep], rows[keep]
