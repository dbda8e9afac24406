"""The grid of a sweep, as it is written: lr=1e-3,3e-4 wd=0,0.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

Value = bool | int | float | str


def parse_axes(words: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Name -> values; UsageError for what is no NAME=VALUE,VALUE."""
    axes: dict[str, tuple[Value, ...]] = {}
    for word in words:
        name, _, values = word.partition("=")
        given = tuple(parse_value(value) for value in values.split(",") if value.strip())
        if not name.isidentifier() or not given:
            raise UsageError(f"{word!r} is not part of a grid: write NAME=VALUE,VALUE")
        if name in axes:
            raise UsageError(f"{name} appears twice in the grid: write all of its values once")
        axes[name] = given
    return axes


def parse_value(text: str) -> Value:
    """A number or a truth value where it is one."""
    text = text.strip()
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
