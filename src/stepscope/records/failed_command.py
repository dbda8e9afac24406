"""A command that failed: its exit code, and the exception that ended one of its processes."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.place import Place  # noqa: TC001  (decoded at run time)

if TYPE_CHECKING:
    from typing import Any


class FailedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`run.failed` in the JSON."""

    exit_code: int
    signal: str | None = None  # the one that ended it, by its exit code
    exception: str | None = None  # its last line: ValueError: bad batch
    place: Place | None = None  # the innermost line of the user's own code
    step: int | None = None  # steps that had ended
    rank: int | None = None  # of the process that raised it; None for one that trains nothing

    @property
    def words(self) -> str:
        """exit code 1 after step 1,200: ValueError: bad batch (train.py:33 in main)."""
        how = f"{self.signal} (exit code {self.exit_code})" if self.signal else ""
        words = how or f"exit code {self.exit_code}"
        if self.step is not None:
            words += f" after step {self.step:,}" if self.step else " before the first step ended"
        if self.exception:
            rank = f"rank {self.rank}: " if self.rank else ""
            words += f": {rank}{self.exception}"
        if self.place is not None:
            inside = f" in {self.place.function}" if self.place.function else ""
            words += f" ({PurePath(self.place.file).name}:{self.place.line}{inside})"
        return words


def failed_json(failed: FailedCommand | None) -> dict[str, Any] | None:
    """None for a command that ended well, or whose end is not known."""
    return msgspec.to_builtins(failed) if failed is not None else None
