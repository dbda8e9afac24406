"""A window's trace on disk: written by the profiler as text, then compressed; whole or absent."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_TAIL_BYTES = 64


class TraceFile:
    """One file; a thread compresses it if one can be started."""

    def __init__(
        self,
        path: Path,
        mark: int,
        *,
        after: Sequence[TraceFile],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """`mark` distinguishes the windows of a process; `after` are those it may replace; `then`
        is called when the file has its name."""
        self._path = path
        self._text = layout.temporary(path.with_name(f"{path.name}-{mark}"))
        self._packed = layout.temporary(path.with_name(f"{path.name}-{mark}.gz"))
        self._after = after
        self._then = then
        self._packing: threading.Thread | None = None

    def save(self, profiler: Any) -> None:
        try:
            profiler.export_chrome_trace(str(self._text))
            self._check()
        except Exception as error:
            layout.note_unwritten(layout.TRACE, error)
            self._remove_unfinished()
            return
        packing = threading.Thread(target=self._pack, name="stepscope-gzip")
        try:
            packing.start()
        except RuntimeError:  # no thread can be started: the training waits
            self._pack()
        else:
            self._packing = packing

    def close(self) -> None:
        if self._packing is not None:
            self._packing.join(timeout=60)

    @property
    def is_busy(self) -> bool:
        return self._packing is not None and self._packing.is_alive()

    def _check(self) -> None:
        """The profiler does not report a full disk, but leaves the file cut off."""
        try:
            with self._text.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                whole = file.read().rstrip().endswith(b"}")
        except FileNotFoundError:
            whole = False
        if not whole:
            layout.check_room(self._path.parent)
            raise OSError("the profiler wrote no whole file")

    def _pack(self) -> None:
        try:
            with (
                self._text.open("rb") as source,
                gzip.open(self._packed, "wb", compresslevel=3) as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            for earlier in self._after:
                earlier.close()
            self._packed.replace(self._path)
            self._then()
        except Exception as error:
            layout.note_unwritten(layout.TRACE, error)
        finally:
            self._after = ()
            self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        by_profiler = self._text.with_name(f"{self._text.name}.tmp")
        for file in (by_profiler, self._text, self._packed):
            layout.remove(file)
