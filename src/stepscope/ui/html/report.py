"""One self-contained HTML file: data, styles and scripts inlined, nothing fetched, ever."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from stepscope.explain.snapshot_rank import is_memory_only
from stepscope.records.explanation import GAP_CAUSES
from stepscope.records.job import KINDS as COLLECTIVES
from stepscope.records.words import NAMES
from stepscope.records.words import sentence as sentence  # other pages take it from here
from stepscope.ui.html.classes import EVENT_CLASSES
from stepscope.ui.html.distributed import ranks_view, told_ranks
from stepscope.ui.html.efficiency import MOST_RANKS, efficiency_view
from stepscope.ui.html.memory import MOST_DRAWN, memory_page
from stepscope.ui.html.parts import Slice, gap_labels, slices
from stepscope.ui.html.payload import encode_rank
from stepscope.ui.html.tables import rank_tables
from stepscope.ui.html.whatif import whatif_page
from stepscope.ui.strategies import describe_strategies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Explanation, RankExplanation, Remedy, StepTime
    from stepscope.records.quality import Note
    from stepscope.ui.html.distributed import RanksView
    from stepscope.ui.html.efficiency import EfficiencyView
    from stepscope.ui.html.picture import RankPicture
    from stepscope.ui.html.whatif_grid import WhatIfGrid

STYLES = ("report.css", "roofline.css", "memory.css", "whatif.css")
# In the order they run: each may use what the ones before it define.
SCRIPTS = (
    "format.js",
    "payload.js",
    "palette.js",
    "scene.js",
    "paint.js",
    "lanes.js",
    "ruler.js",
    "overview.js",
    "detail.js",
    "panned.js",
    "timeline.js",
    "flame.js",
    "table.js",
    "heat.js",
    "rank_lanes.js",
    "ranks_section.js",
    "memory.js",
    "whatif_charts.js",
    "whatif_scaling.js",
    "whatif.js",
    "keys.js",
    "theme.js",
    "main.js",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankView:
    """What the template prints about one rank."""

    label: str
    number: int | None
    path: str
    file: str
    facts: list[tuple[str, str, str]]  # label, value, hint
    slices: list[Slice]
    step_ms: float
    quality: list[tuple[str, str]]
    payload: str
    efficiency: EfficiencyView | None
    memory: Markup


def write_report(
    explanation: Explanation,
    pictures: Sequence[RankPicture],
    path: Path,
    *,
    whatif: WhatIfGrid | None = None,
) -> None:
    """Write the report, all of it or none: a reader never meets half a file.

    Pictures are matched to ranks by their trace's path; a rank without one keeps its tables.
    """
    drawn = {picture.path: picture for picture in pictures}
    job, notes = None, explanation.quality
    if explanation.job is not None:
        job, notes = ranks_view(explanation.job, notes), ()
    views = [
        _rank_view(rank, drawn.get(rank.path), notes, place)
        for place, rank in enumerate(told_ranks(explanation, set(drawn)))
    ]
    page = whatif_page(whatif, several=len(explanation.ranks) > 1) if whatif else Markup("")
    _write_atomically(path, _render(explanation, views, job, page))


def _render(
    explanation: Explanation, views: list[_RankView], job: RanksView | None, whatif: Markup
) -> str:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = format_ms
    environment.filters["sentence"] = sentence
    environment.filters["percent"] = format_percent
    environment.filters["saving"] = format_saving
    script = _script()
    return environment.from_string(_source("report.html.j2")).render(
        explanation=explanation,
        slices=slices(explanation.budget),
        ranks=views,
        names={rank.rank: rank.called for rank in explanation.ranks},
        told=len(views),
        all_ranks=len(explanation.ranks),
        job=job,
        strategies=describe_strategies(explanation.strategies) if job else [],
        causes=gap_labels(),
        efficient=any(view.efficiency for view in views),
        remembered=any(view.memory for view in views),
        timeless=all(is_memory_only(rank) for rank in explanation.ranks),
        whatif=whatif,
        style=Markup("".join(map(_source, STYLES))),
        script=Markup(script),
        script_hash=_csp_hash(script),
    )


def _script(names: Sequence[str] = SCRIPTS) -> str:
    """Scripts in one strict closure, led by the words they share with Python."""
    words = {
        "classes": EVENT_CLASSES,
        "causes": GAP_CAUSES,
        "causeLabels": gap_labels(),
        "collectives": COLLECTIVES,
        "names": sorted(NAMES),
    }
    body = "\n".join(_source(name) for name in names)
    return f'(() => {{\n"use strict";\nconst WORDS = {json.dumps(words)};\n{body}\n}})();\n'


def _source(name: str) -> str:
    return files("stepscope.ui.html").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    """Only our own script may run: a name that slipped past the escaping still could not."""
    digest = hashlib.sha256(script.encode()).digest()
    return base64.b64encode(digest).decode("ascii")


def _rank_view(
    rank: RankExplanation,
    picture: RankPicture | None,
    about_all: tuple[Note, ...],
    place: int,
) -> _RankView:
    label = "This trace" if rank.rank is None else rank.called.capitalize()
    return _RankView(
        label=label,
        number=rank.rank,
        path=rank.path,
        file=Path(rank.path).name,
        facts=_facts(rank) if not is_memory_only(rank) else [],
        slices=slices(rank.budget),
        step_ms=rank.budget.step_ms,
        quality=[(note.id, note.detail) for note in (*about_all, *rank.quality)],
        payload=encode_rank(picture, rank_tables(rank)),
        efficiency=efficiency_view(rank, drawn=place < MOST_RANKS),
        memory=memory_page(rank, drawn=place < MOST_DRAWN),
    )


def _facts(rank: RankExplanation) -> list[tuple[str, str, str]]:
    facts: list[tuple[str, str, str]] = []
    if rank.device:
        facts.append(("Device", rank.device, ""))
    elif rank.kind == "cpu":
        facts.append(("Device", "CPU only", ""))
    else:
        facts.append(("Device", rank.kind, "The trace does not name it"))
    if rank.rank is not None:
        world = f" of {rank.world_size}" if rank.world_size else ""
        kind, _, number = rank.called.partition(" ")
        facts.append((kind.capitalize(), f"{number}{world if kind == 'rank' else ''}", ""))
    facts.append(_steps_fact(rank))
    facts += _step_time_facts(rank)
    overlap = rank.timeline.overlap
    if overlap is not None:
        facts.append(("Overlap", format_percent(overlap), "Communication hidden behind compute"))
    facts.append(("Events", f"{rank.events:,}", ""))
    return facts


def _steps_fact(rank: RankExplanation) -> tuple[str, str, str]:
    hints = {
        "profiler": "Marked by the profiler's schedule",
        "optimizer": "No step marks in the trace: taken from optimizer.step",
        "window": "No steps found: the whole window counts as one",
    }
    if rank.steps.source == "window":
        return ("Steps", "none found", hints["window"])
    return ("Steps", f"{len(rank.steps.steps)}", hints[rank.steps.source])


def _step_time_facts(rank: RankExplanation) -> list[tuple[str, str, str]]:
    times = rank.step_ms
    facts: list[tuple[str, str, str]] = []
    if times.truth is not None:
        facts.append(("Step", format_ms(times.truth), "Measured without the profiler"))
    if times.corrected is not None and times.truth is None:
        span = ""
        if times.low is not None and times.high is not None:
            span = f", between {format_ms(times.low)} and {format_ms(times.high)}"
        hint = f"Estimated without the profiler's overhead{span}"
        facts.append(("Step, corrected", format_ms(times.corrected), hint))
    if times.profiled is not None:
        facts.append(("Step, profiled", format_ms(times.profiled), _about_profiled(times)))
    return facts


def _about_profiled(times: StepTime) -> str:
    if times.truth is None or times.profiled is None:
        return "The profiler itself slows the host: real steps are shorter"
    if times.truth > times.profiled:
        return "In the profiler's window: the steps outside it took longer"
    return "In the profiler's window: the profiler itself slows the host"


def format_ms(ms: float) -> str:
    """Milliseconds with three significant figures, in the unit that reads best."""
    if ms >= 1000:
        return f"{_three_figures(ms / 1000)} s"
    if ms >= 0.1 or ms == 0:
        return f"{_three_figures(ms)} ms"
    return f"{_three_figures(ms * 1000)} µs"


def format_saving(remedy: Remedy) -> tuple[str, str]:
    """What a remedy would save of each step, or that the step would be longer; and the interval."""
    saved, low, high = remedy.predicted_ms, remedy.low_ms, remedy.high_ms
    if saved is None:
        return "", ""
    sign = 1 if saved >= 0 else -1
    words = f"saves {format_ms(saved)}" if saved >= 0 else f"{format_ms(-saved)} longer"
    if low is None or high is None:
        return words, ""
    ends = sorted((sign * low, sign * high))
    return words, f"{_signed_ms(ends[0])} to {_signed_ms(ends[1])}"


def _signed_ms(ms: float) -> str:
    return format_ms(ms) if ms >= 0 else f"-{format_ms(-ms)}"


def _three_figures(value: float) -> str:
    decimals = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


def format_percent(share: float) -> str:
    """A share as people say it: never 0% for something that is there."""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if percent < 10 else f"{percent:.0f}%"


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="\n") as stream:
            stream.write(text)
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
