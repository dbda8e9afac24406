"""Measurements as text, at most 100 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from measurement import Measurement

WIDTH = 100
_NAME = 29
_NOTHING = "-"


def _row(name: str, *cells: str) -> str:
    widths = (6, 5, 5, 7, 5, 5, 6, 5, 5, 6, 5)
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return " ".join((name.ljust(_NAME), *padded)).rstrip()


HEAD = (
    f"{'':{_NAME}} {'whole process':>18} {'load + explain':>19} {'peak memory':>18} "
    f"{'second open':>12}\n"
) + _row("trace", "s", "HTA", "ratio", "s", "HTA", "ratio", "MB", "HTA", "ratio", "ms", "ratio")


def line(row: Measurement) -> str:
    """One trace."""
    name = row.name if len(row.name) <= _NAME else row.name[: _NAME - 1] + "…"
    return _row(
        name,
        _seconds(row.whole_s),
        _seconds(row.peer_whole_s),
        _times(row.whole_ratio),
        _seconds(row.in_process_s),
        _seconds(row.peer_in_process_s),
        _times(row.in_process_ratio),
        f"{row.peak_bytes / 1e6:.0f}",
        _NOTHING if row.peer_peak_bytes is None else f"{row.peer_peak_bytes / 1e6:.0f}",
        _NOTHING if row.peak_ratio is None else f"{row.peak_ratio:.2f}",
        f"{row.second_load_s * 1e3:.1f}",
        _times(row.cached_ratio),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    decimals = 3 if value < 1 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{decimals}f}"


def _times(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1f}x"
