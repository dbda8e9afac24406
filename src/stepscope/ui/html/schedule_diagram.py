"""A schedule as a picture: a column for each rank, time downwards, an arrow for each message.

Boxes are chunks; the digits in them are the ranks whose data is summed there, found by running the
schedule with symbols. It draws the same objects that the ranks run.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from stepscope.records.collectives.proof import simulate, start_of
from stepscope.records.collectives.schedule import runs
from stepscope.ui.html.bundle import read_page_file
from stepscope.ui.html.svg import drawing, path, rect, text

if TYPE_CHECKING:
    from markupsafe import Markup

    from stepscope.records.collectives.schedule import CollectiveSchedule, Message

_BOX, _HIGH, _GAP = 34, 20, 26  # a chunk's width and height; between ranks
_LEFT, _TOP, _ROW = 70, 46, 66
_SHADES = 4
MOST_RANKS = 8


def draw_schedule(schedule: CollectiveSchedule) -> Markup:
    """Up to eight ranks; more would not fit a page."""
    held = list(simulate(schedule))
    width = _LEFT + schedule.ranks * (schedule.chunks * _BOX + _GAP)
    height = _TOP + len(schedule.steps) * _ROW + _HIGH + 14
    parts = [
        text("diagram-rank is-middle", _x(schedule, rank, schedule.chunks / 2), 16, f"rank {rank}")
        for rank in range(schedule.ranks)
    ]
    parts += [
        text("diagram-chunk is-middle", _x(schedule, rank, chunk + 0.5), 36, f"c{chunk}")
        for rank in range(schedule.ranks)
        for chunk in range(schedule.chunks)
    ]
    parts.append(_state(schedule, 0, held[0], start_of(schedule)))
    for number, (before, after) in enumerate(pairwise(held), start=1):
        arrows = "".join(_arrow(schedule, number, one) for one in schedule.steps[number - 1])
        row = _state(schedule, number, after, before)
        parts.append(f'<g data-step="{number}">{arrows}{row}</g>')
    title = (
        f"{schedule.algorithm} {schedule.kind} over {schedule.ranks} ranks: who sends which chunk "
        "in each step"
    )
    return drawing(width, height, title, parts)


def draw_alone(schedule: CollectiveSchedule) -> str:
    """The same as a file of its own, with the page's light colours."""
    rules = [
        "svg text { font: 11px var(--font); fill: var(--muted); }",
        *(
            line
            for line in read_page_file("laboratory.css").splitlines()
            if line.startswith(("svg .diagram", "svg .shade", "svg .is-"))
        ),
    ]
    used = set(re.findall(r"var\((--[\w-]+)", "".join(rules)))
    light = read_page_file("report.css").split("}", 1)[0]
    colours = [line.strip() for line in light.splitlines() if line.strip().split(":")[0] in used]
    style = "\n".join(["<style>", f"svg {{ {' '.join(colours)} }}", *rules, "</style>"])
    drawn = str(draw_schedule(schedule))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f">{style}", 1
    )


def contribution_words(ranks: frozenset[int]) -> str:
    """0, 0-2, 0 2-3: the ranks in a sum, neighbours joined."""
    spans = runs(sorted(ranks))
    return " ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans)


def _state(
    schedule: CollectiveSchedule,
    row: int,
    held: list[list[frozenset[int]]],
    before: list[list[frozenset[int]]],
) -> str:
    """All ranks' chunks; those that changed have a frame."""
    y = _TOP + row * _ROW
    label = "start" if row == 0 else f"step {row}"
    parts = [text("diagram-step", 4, y + _HIGH / 2 + 4, label)]
    for rank, chunks in enumerate(held):
        for chunk, ranks in enumerate(chunks):
            x = _x(schedule, rank, chunk)
            shade = -(-_SHADES * len(ranks) // schedule.ranks)
            new = " is-new" if ranks != before[rank][chunk] else ""
            words = contribution_words(ranks)
            title = f"rank {rank}, chunk {chunk}: " + (f"sum of {words}" if words else "empty")
            kind = f"diagram-box shade-{shade}{new}"
            parts.append(rect(kind, x + 1, y, _BOX - 2, _HIGH, rx=3, title=title))
            parts.append(text("diagram-sum is-middle", x + _BOX / 2, y + _HIGH / 2 + 4, words))
    return "".join(parts)


def _arrow(schedule: CollectiveSchedule, row: int, message: Message) -> str:
    """From the middle of each run of chunks to the same chunks of the target."""
    parts = []
    for first, end in runs(message.chunks):
        middle = (first + end) / 2
        source, target = (_x(schedule, rank, middle) for rank in (message.source, message.target))
        top, bottom = _TOP + (row - 1) * _ROW + _HIGH + 2, _TOP + row * _ROW - 3
        kind = "diagram-add" if message.adds else "diagram-copy"
        chunks = f"chunk {first}" if end == first + 1 else f"chunks {first}-{end - 1}"
        what = "adds" if message.adds else "keeps"
        title = f"rank {message.source} → rank {message.target}, which {what} {chunks}"
        parts.append(path(kind, [(source, top), (target, bottom)], title=title))
        head = [(target - 4, bottom - 5), (target, bottom + 1), (target + 4, bottom - 5)]
        parts.append(path(f"{kind} is-head", head, closed=True))
    return "".join(parts)


def _x(schedule: CollectiveSchedule, rank: int, chunk: float) -> float:
    return _LEFT + rank * (schedule.chunks * _BOX + _GAP) + chunk * _BOX
