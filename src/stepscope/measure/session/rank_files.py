"""Write the files of a rank while it trains: rank.json, step times, clock rounds,
collectives, samples.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.cluster.clock_sync import RUN, ClockSync
from stepscope.measure.cluster.flight_recorder import CollectiveLog
from stepscope.measure.cluster.tcp_links import Links
from stepscope.measure.folder import KeptJson
from stepscope.measure.never_raise import never_raise, problems
from stepscope.measure.ranks import facts, rank_and_world
from stepscope.measure.steps.step_times import DeviceClock
from stepscope.measure.writer import LineWriter, started_thread, try_append
from stepscope.records.folders import this_process

if TYPE_CHECKING:
    from stepscope.measure.compiler_log import CompilerLog
    from stepscope.measure.profiler.extra_windows import WindowRequests
    from stepscope.measure.profiler.sampler import Sampler


class RankParts:
    """One rank's open files, its clock rounds and its sampler."""

    def __init__(
        self,
        folder: Path,
        steps: LineWriter,
        sampler: Sampler | None,
        requests: WindowRequests,
        compiler: CompilerLog | None,
    ) -> None:
        self.folder = folder
        alone = rank_and_world()[1] == 1
        self._steps = steps
        self.device = DeviceClock.here()
        self._writing: list[threading.Thread] = []
        self._clocks = ClockSync()
        self._sampler = sampler
        if sampler is not None:
            sampler.save = self._save_samples
        self._log = None if alone else CollectiveLog(folder)
        self._links = None if alone else Links()
        self._requests, self._compiler = requests, compiler
        steps.beside = self._look_around

    def _look_around(self) -> None:
        """In the writer's thread, once per flush."""
        self._requests.look()
        if self._links is not None:
            self._links.look_if_rested(self._requests.step)
        if self._compiler is not None:
            self._compiler.write(self.folder)

    def due(self, step: int) -> int:
        """The first step, from this one on, before which `look_at_others` has work to do."""
        if self._log is None:
            return sys.maxsize
        return min(self._log.due, self._clocks.next_meeting(step))

    def look_at_others(self, step: int, *, disturbed: bool) -> None:
        """Keep the run's collectives, and compare clocks, when they are due."""
        if self._log is not None:
            self._log.step_begins(step, disturbed=disturbed)
            if self._clocks.next_meeting(step) == step:
                self.synchronise(RUN, step)

    @never_raise
    def synchronise(self, label: str, step: int) -> None:
        before = self._clocks.entries
        self._clocks.synchronise(label, step)
        if self._clocks.entries != before:
            layout.try_write_json(self.folder / layout.CLOCK, self._clocks.content())

    @never_raise
    def look_at_links(self, step: int) -> None:
        """Before the connections may be gone; with two looks, what was sent between is kept."""
        if self._links is None:
            return
        self._links.look(step)
        content = self._links.content()
        if content is not None:
            layout.try_write_json(self.folder / layout.LINKS, content)

    @never_raise
    def collectives(self, lines: list[dict[str, Any]], name: str = layout.COMMS) -> None:
        """They come once per window: a short thread writes them, not one that keeps waking."""
        if lines:

            @never_raise
            def write() -> None:
                try_append(self.folder / name, lines, name=layout.COMMS)

            thread = started_thread(write, "stepscope-comms")
            if thread is None:
                write()
            else:
                self._writing = [*filter(lambda writing: writing.is_alive(), self._writing), thread]

    def sampler_pauses(self) -> None:
        if self._sampler is not None:
            self._sampler.pause()

    def sampler_resumes(self) -> None:
        if self._sampler is not None:
            self._sampler.resume()

    @never_raise
    def close(self, step: int) -> None:
        self._steps.close()
        if self._compiler is not None:
            self._compiler.look()
            self._compiler.write(self.folder)
        self.look_at_links(step)
        if self._log is not None:
            self._log.close(step)
        for thread in self._writing:
            thread.join(timeout=5)
        if self._sampler is not None:
            self._save_samples(self._sampler.close())

    def _save_samples(self, content: dict[str, Any]) -> None:
        layout.try_write_json(self.folder / layout.SAMPLES, content)


# rank.json: what this rank is, how far it came and what went wrong.


class RankFile:
    """Written when the first step ends and when the rank does."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._file = KeptJson(folder / layout.RANK)
        self._rank, self._world_size = rank, world_size

    def write(self, status: str, progress: dict[str, Any], surroundings: dict[str, Any]) -> None:
        """On a full disk the surroundings are left out first, then most problems."""
        short = {
            "schema": layout.SCHEMA,
            "rank": self._rank,
            "world_size": self._world_size,
            "status": status,
            **progress,
            "process": asdict(this_process()),
            "problems": problems(),
        }
        whole = {**short, "argv": sys.argv, **surroundings, **facts()}
        shortest = {**short, "problems": problems()[:3]}
        try:
            self._file.write(whole, short, shortest, last=status != "running")
        except OSError as error:
            layout.note_unwritten(layout.RANK, error)
