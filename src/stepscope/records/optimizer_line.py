"""Where the training calls its optimizer."""

from __future__ import annotations

import msgspec

from stepscope.records.limits import Count  # noqa: TC001 - msgspec reads it
from stepscope.records.place import Place


class OptimizerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The line whose call of `step` was the first of one optimizer."""

    optimizer: str  # its class: AdamW
    file: str
    line: Count
    function: str = ""

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, function=self.function)
