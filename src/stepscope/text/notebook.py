"""Results in a Python prompt or a notebook: one line, or a compact report.

A card is plain HTML with inline styles: every text is escaped, nothing is fetched, no script runs.
Colours of text and lines come from the page, so that a card suits light and dark notebooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stepscope.text.figures import percent
from stepscope.text.words import STEP_PARTS, StepPart

_MAX_CHARACTERS = 160
_MAX_CELL = 400  # characters: a name from a trace may be endless
_MIN_SHARE = 0.005
SEVERITY_COLOURS = {"high": "#d9483b", "medium": "#e0a030", "low": "#3f74c9", "none": "#2e9e6b"}
_CARD = (
    "max-width:62em;margin:.3em 0;padding:.6em .9em;border:1px solid rgba(128,128,128,.35);"
    "border-radius:6px;line-height:1.45;text-align:left"
)
_TABLE = "border-collapse:collapse;margin:.5em 0 0;font-size:inherit;border:none"
_LABEL = (
    "opacity:.65;padding:.1em .9em .1em 0;text-align:left;vertical-align:top;white-space:nowrap;"
    "background:transparent;border:none"
)
_TEXT = "text-align:left;padding:.1em 0;background:transparent;border:none"
_CHART_ROW = "display:flex;align-items:center;gap:.8em"
_TRACK = "background:rgba(128,128,128,.18);border-radius:3px;overflow:hidden"


class MarkedLine(NamedTuple):
    """A line of a list: a coloured dot, a figure, and text."""

    colour: str
    figure: str
    text: str


class Length(NamedTuple):
    """A bar of a small chart, and the doubt about its end; in one unit within a chart."""

    label: str
    value: float
    words: str
    low: float | None = None
    high: float | None = None


def escape(text: str) -> str:
    """Loading html takes longer than escaping anything, and few results are shown as cards. Signs
    that cannot be seen might turn the text around: they are replaced."""
    import html

    text = _cut(text, _MAX_CELL)
    if not text.isprintable():
        text = "".join(sign if sign.isprintable() else "\ufffd" for sign in text)
    return html.escape(text)


def line(kind: str, *facts: str) -> str:
    """`<Explanation: verdict; 24.9 ms a step>`; a long first fact is cut."""
    first, *rest = facts
    return f"<{kind}: {'; '.join([_cut(first, _MAX_CHARACTERS).rstrip('.'), *rest])}>"


def card(
    title: str,
    rows: Sequence[tuple[str, str | Sequence[MarkedLine]]],
    *,
    aside: str = "",
    parts: Iterable[tuple[str, float]] = (),
    lengths: Sequence[Length] = (),
) -> str:
    """A title, a bar of (id, share of the step) or a chart of lengths, then rows with labels."""
    head = f'<div style="font-weight:600">{escape(title)}</div>'
    if aside:
        head += f'<div style="opacity:.7;font-size:90%">{escape(aside)}</div>'
    cells = "".join(_row(label, content) for label, content in rows if content)
    table = f'<table style="{_TABLE}"><tbody>{cells}</tbody></table>' if cells else ""
    return f'<div style="{_CARD}">{head}{_bar(parts)}{_chart(lengths)}{table}</div>'


def _row(label: str, content: str | Sequence[MarkedLine]) -> str:
    text = escape(content) if isinstance(content, str) else "".join(map(_marked, content))
    return (
        f'<tr style="background:transparent"><td style="{_LABEL}">{escape(label)}</td>'
        f'<td style="{_TEXT}">{text}</td></tr>'
    )


def _marked(one: MarkedLine) -> str:
    figure = f'<span style="opacity:.75">{escape(one.figure)}</span> ' if one.figure else ""
    return f"<div>{_dot(one.colour)} {figure}{escape(one.text)}</div>"


def _dot(colour: str) -> str:
    return (
        f'<span style="display:inline-block;width:.7em;height:.7em;border-radius:2px;'
        f'background:{colour}"></span>'
    )


def _bar(parts: Iterable[tuple[str, float]]) -> str:
    visible = [(_look(name), share) for name, share in parts if share >= _MIN_SHARE]
    if not visible:
        return ""
    slices = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{part.colour}" '
        f'title="{escape(part.label)} {percent(share)}"></span>'
        for part, share in visible
    )
    legend = "".join(
        f'<span style="margin-right:1em;white-space:nowrap">{_dot(part.colour)} '
        f"{escape(part.label)} {percent(share)}</span>"
        for part, share in visible
    )
    return (
        f'<div style="display:flex;height:14px;margin:.5em 0 .3em;{_TRACK}">{slices}</div>'
        f'<div style="font-size:90%">{legend}</div>'
    )


def _chart(lengths: Sequence[Length]) -> str:
    longest = max((one.high or one.value for one in lengths), default=0.0)
    if not longest > 0:
        return ""
    rows = "".join(
        f'<div style="{_CHART_ROW}"><div style="flex:0 0 4em;opacity:.65">{escape(one.label)}</div>'
        f'<div style="flex:1;position:relative;height:12px;{_TRACK}">'
        f'<div style="height:12px;width:{_width(one.value, longest)};background:#3f74c9"></div>'
        f'{_doubt(one, longest)}</div><div style="flex:0 0 14em">{escape(one.words)}</div></div>'
        for one in lengths
    )
    return f'<div style="margin:.5em 0 0">{rows}</div>'


def _doubt(one: Length, longest: float) -> str:
    """The interval, as a pale stretch over the bar's end."""
    if one.low is None or one.high is None:
        return ""
    return (
        f'<div style="position:absolute;top:3px;height:6px;left:{_width(one.low, longest)};'
        f'width:{_width(one.high - one.low, longest)};background:rgba(224,160,48,.85)"></div>'
    )


def _width(value: float, longest: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / longest)):.2f}%"


def _cut(text: str, most: int) -> str:
    """Between words, if one ends in the last third."""
    if len(text) <= most:
        return text
    whole, _, part = text[:most].rpartition(" ")
    kept = whole if len(part) < most / 3 else text[: most - 1]
    return f"{kept.rstrip()}…"


def _look(name: str) -> StepPart:
    return STEP_PARTS.get(name) or StepPart(name.replace("_", " "), "#888888", "white")
