"""Files copied into one folder, each whole or not at all; what is there already stays."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import stepscope
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.measure import folder as layout
from stepscope.trace.rank_facts import folder_rank
from stepscope.trace.windows import choose_window, window_number
from stepscope.ui.gather_plan import GATHERED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.ui.gather_plan import FileCopy

    Progress = Callable[[int, int], None]

AT_ONCE = 8
_SAME_TIME_S = 1.0  # file systems keep times more or less finely


class CopiedFile(msgspec.Struct, frozen=True):
    """One file in gathered.json."""

    source: str
    size_bytes: int
    stamp: str


class GatherRecord(msgspec.Struct, frozen=True):
    """gathered.json."""

    schema: int = 1
    stepscope: str = ""
    sources: tuple[str, ...] = ()
    files: dict[str, CopiedFile] = {}
    updated_unix: float | None = None


class Copier:
    """Copies files into one folder, and knows which were there."""

    def __init__(self, out: Path, record: GatherRecord, progress: Progress | None) -> None:
        self._out, self._record, self._progress = out, record, progress
        self._files = dict(record.files)
        self._done_bytes = self._all_bytes = 0
        self.copied: list[FileCopy] = []
        self.kept: list[FileCopy] = []
        self.skipped: list[FileCopy] = []  # windows that do not stand for the run

    def copy(self, copies: Sequence[FileCopy], *, everything: bool) -> None:
        """Traces come last: which window of them is needed, the steps say."""
        traces = [copy for copy in copies if _window(copy) is not None]
        small = [copy for copy in copies if _window(copy) is None]
        self._all_bytes = sum(copy.file.size_bytes for copy in copies)
        self._copy_all(small)
        chosen = traces if everything else _chosen_windows(traces, self._out)
        self.skipped = [copy for copy in traces if copy not in chosen]
        self._all_bytes -= sum(copy.file.size_bytes for copy in self.skipped)
        self._copy_all(chosen)

    def _copy_all(self, copies: Sequence[FileCopy]) -> None:
        wanted = []
        for copy in copies:
            if self._is_there(copy):
                self.kept.append(copy)
                self._advance(copy)
            else:
                wanted.append(copy)
        for folder in {(self._out / copy.target).parent for copy in wanted}:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = {pool.submit(self._copy, copy): copy for copy in wanted}
            try:
                for done in as_completed(running):
                    done.result()
                    copy = running[done]
                    self._remember(copy)
                    self.copied.append(copy)
                    self._advance(copy)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _copy(self, copy: FileCopy) -> None:
        target = self._out / copy.target
        unfinished = layout.temporary(target)
        try:
            copy.source.fetch(copy.file.name, unfinished)
            size = unfinished.stat().st_size
            if size < copy.file.size_bytes:
                raise UnreadableInputError(
                    f"{copy.source}/{copy.file.name}: only {size} of {copy.file.size_bytes} bytes "
                    "came: gather again"
                )
            if copy.file.modified_unix is not None:
                os.utime(unfinished, (copy.file.modified_unix, copy.file.modified_unix))
            unfinished.replace(target)
        except OSError as error:
            why = layout.why_refused(error)
            raise UsageError(f"{target} could not be written: {why}") from None
        finally:
            layout.remove(unfinished)

    def _is_there(self, copy: FileCopy) -> bool:
        """Whether an earlier call copied this very file."""
        try:
            state = (self._out / copy.target).stat()
        except OSError:
            return False
        known = self._files.get(copy.target)
        listed = (copy.file.size_bytes, copy.file.stamp)
        if known is not None and (known.size_bytes, known.stamp) == listed and copy.file.stamp:
            return known.size_bytes <= state.st_size
        modified = copy.file.modified_unix
        if state.st_size != copy.file.size_bytes or modified is None:
            return False
        if abs(state.st_mtime - modified) > _SAME_TIME_S:
            return False
        self._remember(copy)
        return True

    def _remember(self, copy: FileCopy) -> None:
        self._files[copy.target] = CopiedFile(
            str(copy.source), copy.file.size_bytes, copy.file.stamp
        )

    def _advance(self, copy: FileCopy) -> None:
        self._done_bytes += copy.file.size_bytes
        if self._progress:
            self._progress(self._done_bytes, self._all_bytes)

    def save(self, sources: Sequence[str]) -> None:
        record = GatherRecord(
            stepscope=stepscope.__version__,
            sources=tuple(dict.fromkeys([*self._record.sources, *sources])),
            files=dict(sorted(self._files.items())),
            updated_unix=time.time(),
        )
        with contextlib.suppress(OSError):
            layout.write_json(self._out / GATHERED, msgspec.to_builtins(record))


def _window(copy: FileCopy) -> int | None:
    folder, _, name = copy.target.rpartition("/")
    return window_number(name) if folder_rank(Path(folder)) is not None else None


def _chosen_windows(traces: Sequence[FileCopy], out: Path) -> list[FileCopy]:
    """Of several windows, the one that `explain` takes for the run."""
    by_rank: dict[str, dict[int, FileCopy]] = {}
    for copy in sorted(traces, key=lambda copy: copy.target):
        number = _window(copy)
        if number is not None:
            by_rank.setdefault(copy.target.rpartition("/")[0], {}).setdefault(number, copy)
    if not by_rank:
        return []
    chosen = choose_window([set(windows) for windows in by_rank.values()], out / min(by_rank))
    return [windows.get(chosen) or windows[min(windows)] for windows in by_rank.values()]
