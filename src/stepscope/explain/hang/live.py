"""The answer of `hang` for views that look at a run every second."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.explain.hang.verdict import explain_hang
from stepscope.records.folders import HANG_REQUEST
from stepscope.records.hang import HangAnswer
from stepscope.trace.run_folder.hang_files import read_hang
from stepscope.trace.run_folder.run_times import stamp_of

_FRESH_S = 5.0


def hang_now(folder: Path, now: float) -> HangAnswer | None:
    """None where nobody has recorded a hang that still lasts."""
    stamp = stamp_of(folder / HANG_REQUEST)
    return _answer(folder, stamp[0], int(now / _FRESH_S)) if stamp is not None else None


@lru_cache(maxsize=8)
def _answer(folder: Path, asked_ns: int, period: int) -> HangAnswer | None:
    """Ranks may write for some seconds after they were asked, so it holds for one period only."""
    del asked_ns
    try:
        answer = explain_hang(read_hang(folder), (period + 1) * _FRESH_S)
    except StepscopeError:
        return None
    return answer if answer.kind != "none" else None
