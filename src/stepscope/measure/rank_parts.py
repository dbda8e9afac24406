"""The files a rank writes while it trains: step times, clock rounds, collectives, samples."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.clock import ClockSync
from stepscope.measure.never_raise import never_raise
from stepscope.measure.steps import DeviceClock
from stepscope.measure.writer import LineWriter, append_lines, started_thread

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from stepscope.measure.sampler import Sampler


class RankParts:
    """One rank's open files, its clock rounds and its sampler."""

    def __init__(self, folder: Path, steps: LineWriter, sampler: Sampler | None) -> None:
        self.folder = folder
        self._steps = steps
        self.device = DeviceClock.here()
        self._writing: list[threading.Thread] = []
        self._clocks = ClockSync()
        self._sampler = sampler

    @never_raise
    def synchronise(self, label: str, step: int) -> None:
        if self._clocks.synchronise(label, step) is not None:
            layout.try_write_json(self.folder / layout.CLOCK, self._clocks.content())

    @never_raise
    def collectives(self, lines: list[dict[str, Any]], name: str = layout.COMMS) -> None:
        """They come once per window: a short thread writes them, not one that keeps waking."""
        if lines:
            thread = started_thread(lambda: self._write_collectives(lines, name), "stepscope-comms")
            if thread is None:
                self._write_collectives(lines, name)
            else:
                self._writing = [*filter(lambda writing: writing.is_alive(), self._writing), thread]

    @never_raise
    def _write_collectives(self, lines: list[dict[str, Any]], name: str) -> None:
        try:
            append_lines(self.folder / name, map(json.dumps, lines))
        except OSError as error:
            layout.note_unwritten(layout.COMMS, error)

    def sampler_pauses(self) -> None:
        if self._sampler is not None:
            self._sampler.pause()

    def sampler_resumes(self) -> None:
        if self._sampler is not None:
            self._sampler.resume()

    @never_raise
    def close(self) -> None:
        self._steps.close()
        for thread in self._writing:
            thread.join(timeout=5)
        if self._sampler is not None:
            layout.try_write_json(self.folder / layout.SAMPLES, self._sampler.close())
