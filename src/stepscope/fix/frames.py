"""Which lines of the user's own code led here."""

from __future__ import annotations

import sys
import sysconfig
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.records.script_facts import Frame

if TYPE_CHECKING:
    from types import FrameType

_MOST = 12
_OURS = str(Path(__file__).parents[1])
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"]))


def is_users(file: str) -> bool:
    """Not a library's, the interpreter's or ours."""
    return not (
        file.startswith((_OURS, _STDLIB, "<")) or "site-packages" in file or "dist-packages" in file
    )


def called_by_user() -> bool:
    """Whether the innermost frame that is not ours is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def calling_library() -> str:
    """The package that called torch, if the user's own code did not: transformers, say."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None or is_users(frame.f_code.co_filename):
        return ""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def users_frames() -> tuple[Frame, ...]:
    """The user's frames of this thread, innermost first."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _MOST:
        code = frame.f_code
        if is_users(code.co_filename):
            file = str(Path(code.co_filename).absolute())
            found.append(
                Frame(file=file, line=frame.f_lineno, function=code.co_qualname, ends=_ends(frame))
            )
        frame = frame.f_back
    return tuple(found)


def _ends(frame: FrameType) -> tuple[int, int] | None:
    """Where the expression that runs ends; not known if Python runs without columns."""
    instruction = frame.f_lasti // 2
    positions = next(islice(frame.f_code.co_positions(), instruction, None), None)
    if positions is None or positions[1] is None or positions[3] is None:
        return None
    return positions[1], positions[3]
