"""Results in a Python prompt or a notebook: one line, or a small card.

A card is plain HTML with inline styles: every text is escaped, nothing is fetched, no script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_CHARACTERS = 160
_MIN_SHARE = 0.005
_COLOURS = {
    "compute": "#2e9e6b",
    "exposed_comm": "#a855c7",
    "exposed_memory": "#c79a1e",
    "data_loading": "#d9483b",
    "sync": "#e0a030",
    "operators": "#3f74c9",
    "python": "#3aa6b9",
    "profiler": "#8a8f98",
    "idle_launch": "#7d9be0",
    "idle_other": "#b8bcc4",
    "stall_data": "#c2417c",
    "stall_evaluation": "#7a5cc9",
    "stall_checkpoint": "#b58900",
    "stall_gc": "#4c9a5b",
    "stall_compile": "#0b98b0",
    "stall_allocator": "#a0522d",
    "stall_collective": "#e8742c",
    "stall_operating_system": "#4b5563",
    "stall_logging": "#8f8a26",
    "stall_unknown": "#8a93a0",
}


def escape(text: str) -> str:
    """Loading html takes longer than escaping anything, and few results are shown as cards."""
    import html

    return html.escape(text)


def line(kind: str, *facts: str) -> str:
    """`<Explanation: verdict; 24.9 ms a step>`; a long first fact is cut."""
    first, *rest = facts
    if len(first) > _MAX_CHARACTERS:
        first = f"{first[: _MAX_CHARACTERS - 1].rstrip()}…"
    return f"<{kind}: {'; '.join([first.rstrip('.'), *rest])}>"


def card(rows: Sequence[tuple[str, str]], parts: Iterable[tuple[str, float]] = ()) -> str:
    """A table of labels and sentences, and below it a bar of (id, share of the step)."""
    cells = "".join(
        f'<tr><td style="opacity:.6;text-align:left;vertical-align:top">{escape(label)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in rows
        if text
    )
    return f'<div style="max-width:60em"><table>{cells}</table>{_bar(parts)}</div>'


def _bar(parts: Iterable[tuple[str, float]]) -> str:
    visible = [(name, share) for name, share in parts if share >= _MIN_SHARE]
    if not visible:
        return ""
    slices = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{_COLOURS.get(name, "#888")}" '
        f'title="{escape(_words(name))} {percent(share)}"></span>'
        for name, share in visible
    )
    legend = " · ".join(f"{escape(_words(name))} {percent(share)}" for name, share in visible)
    return (
        f'<div style="display:flex;height:12px">{slices}</div>'
        f'<div style="font-size:smaller;opacity:.8">{legend}</div>'
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
