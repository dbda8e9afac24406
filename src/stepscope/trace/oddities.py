"""Values that a file cannot have meant: counted, the first kept as an example, never used."""

from __future__ import annotations

from typing import Any

from stepscope.records.quality import Note
from stepscope.records.words import counted

ID = "odd-values"
_LONGEST_EXAMPLE = 40
_LARGEST_EXAMPLE = 1 << 128


class Oddities:
    """Everything odd about one file, by what it is."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def count(self, what: str, value: Any, place: str, many: int = 1) -> None:
        """`many` of the same kind, of which `value` at `place` is the first."""
        before, first = self._found.get(what, (0, f"{shown(value)} at {place}"))
        self._found[what] = (before + many, first)

    def notes(self) -> tuple[Note, ...]:
        """One for each kind."""
        return tuple(
            Note(
                id=ID,
                detail=f"not used: {counted(many, 'value')} of {what}, the first {first}",
                count=many,
            )
            for what, (many, first) in self._found.items()
        )


def shown(value: Any) -> str:
    """An example in a few characters, however large or deep the value is."""
    if value is None:
        return "missing"
    if type(value) is int and not -_LARGEST_EXAMPLE < value < _LARGEST_EXAMPLE:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        text = ascii(value[:_LONGEST_EXAMPLE])
        whole = len(value) <= _LONGEST_EXAMPLE and len(text) <= 2 * _LONGEST_EXAMPLE
        return text if whole else f"{text[: 2 * _LONGEST_EXAMPLE]}..."
    return f"a {type(value).__name__}"
