"""The attempt of a rank that took part in some attempts only, because the job grew or shrank.

Its folders are numbered from its own first process; rank 0 takes part in every attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.trace.regular_files import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FIRST_RANK = "rank-00000"


def attempt_by_time(
    folder: Path, began_ns: int, last_end_ns: Callable[[Path], int], place: int
) -> int | None:
    """One more than the attempts of rank 0 that had ended when this process began.

    None for a rank with as many processes as rank 0: the `place` of this one among them decides.
    """
    name = folder.name.partition(".")[0]
    if name == _FIRST_RANK or not is_folder(_numbered(folder, _FIRST_RANK, place + 1)):
        return None
    if _count(folder, name) >= _count(folder, _FIRST_RANK):
        return None
    attempt = 1
    while began_ns >= last_end_ns(_numbered(folder, _FIRST_RANK, attempt)):
        if not is_folder(_numbered(folder, _FIRST_RANK, attempt + 1)):
            break
        attempt += 1
    return attempt


def _count(folder: Path, name: str) -> int:
    number = 1
    while is_folder(_numbered(folder, name, number + 1)):
        number += 1
    return number


def _numbered(folder: Path, name: str, number: int) -> Path:
    return folder.with_name(name if number == 1 else f"{name}.{number}")
