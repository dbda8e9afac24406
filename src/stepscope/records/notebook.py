"""Results as a notebook or a Python prompt shows them: a line or two, or a small card.

A card is plain HTML with its styles inside: every text escaped, nothing fetched, no script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST_CHARACTERS = 160
_LEAST_SHARE = 0.005
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
}


def escape(text: str) -> str:
    """Loading html takes longer than escaping anything, and few results are shown as cards."""
    import html

    return html.escape(text)


def line(kind: str, *facts: str) -> str:
    """`<Explanation: verdict; 24.88 ms a step>`: the first fact is cut where it is long."""
    first, *rest = facts
    if len(first) > _MOST_CHARACTERS:
        first = f"{first[: _MOST_CHARACTERS - 1].rstrip()}…"
    return f"<{kind}: {'; '.join([first.rstrip('.'), *rest])}>"


def card(rows: Sequence[tuple[str, str]], parts: Iterable[tuple[str, float]] = ()) -> str:
    """A table of words and sentences, and a bar of (id, share of the step) under it."""
    cells = "".join(
        f'<tr><td style="opacity:.6;text-align:left;vertical-align:top">{escape(word)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for word, text in rows
        if text
    )
    return f'<div style="max-width:60em"><table>{cells}</table>{_bar(parts)}</div>'


def _bar(parts: Iterable[tuple[str, float]]) -> str:
    shown = [(name, share) for name, share in parts if share >= _LEAST_SHARE]
    if not shown:
        return ""
    slices = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{_COLOURS.get(name, "#888")}" '
        f'title="{escape(_words(name))} {share:.0%}"></span>'
        for name, share in shown
    )
    legend = " · ".join(f"{escape(_words(name))} {share:.0%}" for name, share in shown)
    return (
        f'<div style="display:flex;height:12px">{slices}</div>'
        f'<div style="font-size:smaller;opacity:.8">{legend}</div>'
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
