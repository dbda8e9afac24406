"""Print the whole explanation (--full): verdict, why, next, the step as one bar, and all tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.explain.incomplete_ranks import is_server_only, is_untimed
from stepscope.explain.job.rank_part import own_ms, typical_step
from stepscope.records.compiled import CompiledWork, RegionTime
from stepscope.records.explanation import Advice, Budget, Explanation, Finding, RankExplanation
from stepscope.records.hardware import Efficiency, above_peak, which_call
from stepscope.records.source_lines import Place
from stepscope.text.figures import (
    byte_rate,
    duration,
    flop_rate,
    flops,
    interval,
    milliseconds,
    percent,
    significant,
    size,
)
from stepscope.text.words import counted
from stepscope.ui.advice import not_helping
from stepscope.ui.terminal.console import (
    COLOURS,
    FILLS,
    SEVERITY_STYLES,
    answer_grid,
    budget_bar,
    draw_legend,
    fitting_table,
    make_console,
    note_line,
    print_path,
    text_line,
    titled_table,
)
from stepscope.ui.terminal.distributed import host_table, job_sections
from stepscope.ui.terminal.memory import memory_sections
from stepscope.ui.terminal.whole_run import run_sections
from stepscope.ui.topics.device_use import (
    MFU_WORDS,
    against_fastest,
    efficiency_headline,
    gaps,
    share_of_peak,
    share_of_roof,
)
from stepscope.ui.words import (
    PARTS,
    Answer,
    applied_line,
    failed_line,
    one_line,
    or_dash,
    short_kernel,
)

# With more ranks, only the slowest and the fastest are listed.
_MOST_RANKS = 16
_SLOWEST, _FASTEST = 5, 3


def print_explanation(
    explanation: Explanation,
    *,
    top: int = 8,
    report: Path | None = None,
    width: int | None = None,
    to_stderr: bool = False,
) -> None:
    """Print everything; to stderr if stdout is the command's own."""
    console = make_console(width, to_stderr=to_stderr)
    console.print(Group(*_sections(explanation, top, console.width)))
    print_path(console, "report  ", report)


def _started_and_ended(explanation: Explanation) -> list[RenderableType]:
    """Whether the command failed, and what the run was started with."""
    failed, applied = failed_line(explanation), applied_line(explanation.origin)
    lines: list[RenderableType] = [text_line(failed, "bold red")] if failed else []
    return [*lines, text_line(f"run with {applied}")] if applied else lines


def _sections(explanation: Explanation, top: int, width: int) -> list[RenderableType]:
    worst = _rank_to_show(explanation)
    if is_untimed(worst):
        return _untimed_sections(explanation, worst, top, width)
    out: list[RenderableType] = [_headline(explanation)]
    out += _started_and_ended(explanation)
    out += [Text(), _verdict(explanation), Text()]
    out += [budget_bar(explanation.budget, width), _legend(explanation.budget, width), Text()]
    if explanation.run is not None:
        out += run_sections(explanation.run, width)
    if len(explanation.ranks) > 1:
        out += [_ranks(explanation.ranks), Text()]
        if explanation.job is not None and (hosts := host_table(explanation.job)) is not None:
            out += [hosts, Text()]
    if explanation.job is not None:
        out += job_sections(explanation.job, top, width)
        out += _communication(explanation, top, width)
    out += _together(explanation, top)
    out += [_findings(explanation.findings), Text()]
    if explanation.advice:
        out += [advice_table(explanation.advice), Text()]
    if worst.efficiency is not None:
        out += efficiency_sections(worst.efficiency, width=width)
    if worst.memory is not None:
        ranks = max(len(explanation.ranks), worst.world_size or 1)
        out += memory_sections(worst.memory, top=top, width=width, ranks=ranks)
    out += _compiled(worst, top, width)
    out += [_kernels(worst, top, width), Text()]
    if worst.operators:
        out += [_operators(worst, top, width), Text()]
    if worst.copies and width > 70:
        out += [_copies(worst, top, width), Text()]
    out += _notes(explanation)
    return out


def _untimed_sections(
    explanation: Explanation, rank: RankExplanation, top: int, width: int
) -> list[RenderableType]:
    """Without a step there is no bar of time: a memory snapshot, or a parameter server alone."""
    path = Path(rank.path)
    name, kind = path.name, "memory snapshot"
    if is_server_only(rank):
        name, kind = path.parent.parent.name, "parameter server"
    title = f"{name} · {kind} · {counted(rank.events, 'event')}"
    memory = memory_sections(rank.memory, top=top, width=width) if rank.memory else []
    return [
        text_line(title, style="bright_black"),
        Text(),
        _verdict(explanation),
        Text(),
        *memory,
        *_together(explanation, top),
        _findings(explanation.findings),
        Text(),
        *_notes(explanation),
    ]


def _compiled(rank: RankExplanation, top: int, width: int) -> list[RenderableType]:
    """What torch.compile did; imported only if it did anything."""
    if rank.compiled is None:
        return []

    return compiled_sections(rank.compiled, top=top, width=width)


def _together(explanation: Explanation, top: int) -> list[RenderableType]:
    """What a parameter server recorded; imported only if there is one."""
    if explanation.together is None:
        return []
    from stepscope.ui.terminal.distributed import together_sections

    return together_sections(explanation.together, top)


def _communication(explanation: Explanation, top: int, width: int) -> list[RenderableType]:
    """Strategies and NCCL's logs; imported only for several ranks."""
    from stepscope.ui.terminal.distributed import nccl_sections, strategy_sections

    parts = explanation.job.hierarchical if explanation.job else ()
    out = strategy_sections(explanation.strategies, parts, top=top, width=width)
    return out + (nccl_sections(explanation.nccl, top=top, width=width) if explanation.nccl else [])


def _rank_to_show(explanation: Explanation) -> RankExplanation:
    named = explanation.findings[0].rank
    return next((r for r in explanation.ranks if r.rank == named), explanation.ranks[0])


def _headline(explanation: Explanation) -> Text:
    first = explanation.ranks[0]
    several = "processes" if first.called.startswith("process") else "ranks"
    alone = len(explanation.ranks) == 1
    name = Path(first.path).name if alone else f"{len(explanation.ranks)} {several}"
    facts = [name, first.device or first.kind.upper()]
    if first.steps.steps:
        facts.append(counted(len(first.steps.steps), "step"))
    facts.append(_step_words(explanation))
    return text_line(" · ".join(facts), style="bright_black")


def _step_words(explanation: Explanation) -> str:
    first = explanation.ranks[0]
    step = milliseconds(explanation.budget.step_ms)
    if first.step_ms.truth is not None and first.step_ms.profiled is not None:
        profiled = max(rank.step_ms.profiled or 0.0 for rank in explanation.ranks)
        host = first.step_ms.host if len(explanation.ranks) == 1 else None
        own = f", {milliseconds(host)} of CPU work" if host is not None else ""
        return f"{step} a step{own}, measured ({milliseconds(profiled)} under the profiler)"
    if first.budget.basis == "corrected":
        times = first.step_ms
        low, high = (significant(ms or 0.0) for ms in (times.low, times.high))
        span = "" if low == high else f" ({low} to {high})"
        with_overhead = significant(times.profiled or 0.0)
        return f"{step} a step{span} without profiler overhead, {with_overhead} with it"
    return f"{step} a step (profiled)" if first.steps.steps else f"{step} window"


def _verdict(explanation: Explanation) -> Table:
    style = SEVERITY_STYLES[explanation.findings[0].severity]
    answer = Answer(verdict=explanation.verdict, why=explanation.why, next=explanation.next)
    grid = answer_grid(answer, f"bold {style}")
    if explanation.also:
        grid.add_row("also", text_line(explanation.also, style="bright_black"))
    return grid


def _legend(budget: Budget, width: int) -> Table:
    parts = [
        (
            FILLS[part.id],
            COLOURS[part.id],
            f"{PARTS[part.id][0].lower():<14}",
            milliseconds(part.ms),
            part.share,
        )
        for part in budget.parts
        if part.share >= 0.0005
    ]
    return draw_legend(parts, width, room=34)


def _ranks(ranks: tuple[RankExplanation, ...]) -> Table:
    many = len(ranks) > _MOST_RANKS
    title = "ranks in the recorded steps, slowest first" if many else "ranks in the recorded steps"
    several = len({rank.part.host for rank in ranks}) > 1
    columns = (">rank", ">step", ">w/o comm", ">compute", ">comm", ">idle", "verdict")
    table = titled_table(title, *(("host", *columns) if several else columns))
    shown = sorted(ranks, key=own_ms, reverse=True) if many else _under_hosts(ranks)
    first, last = (shown[:_SLOWEST], shown[-_FASTEST:]) if many else (shown, [])
    hosts = [one_line(rank.part.host or "-") for rank in (*first, *last)]
    rows = [_rank_row(rank) for rank in (*first, *last)]
    if many:
        hosts.insert(_SLOWEST, "…")
        rows.insert(_SLOWEST, ("…", "", "", "", "", "", f"{len(ranks) - _SLOWEST - _FASTEST} more"))
    for place, (host, row) in enumerate(zip(hosts, rows, strict=True)):
        again = place and hosts[place - 1] == host and not many
        table.add_row(*((("" if again else host), *row) if several else row))
    return table


def _under_hosts(ranks: tuple[RankExplanation, ...]) -> list[RankExplanation]:
    """The ranks of a host together, hosts in the order of their first ranks."""
    first: dict[str | None, int] = {}
    for place, rank in enumerate(ranks):
        first.setdefault(rank.part.host, place)
    return sorted(ranks, key=lambda rank: first[rank.part.host])


def _rank_row(rank: RankExplanation) -> tuple[str, ...]:
    times = typical_step(rank.part.pace)
    whole = times.step_ms or 1.0
    idle = max(0.0, times.own_ms - times.compute_ms)
    return (
        rank.called.removeprefix("rank "),
        milliseconds(times.step_ms),
        milliseconds(times.own_ms),
        percent(times.compute_ms / whole),
        percent(times.exposed_comm_ms / whole),
        percent(idle / whole),
        rank.findings[0].title if rank.findings else "",
    )


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = titled_table("findings (stepscope why ID explains one)", "ID", ">share", "what")
    for finding in findings:
        text = text_line(finding.summary)
        for place in finding.where:
            where = one_line(f"{place.file}:{place.line} {place.function}")
            text.append(f"\n{where}", style="bright_black")
        for remedy in finding.remedies:
            if remedy.tried is not None:
                text.append(f"\n{remedy.tried.label}: {one_line(remedy.tried.words)}")
        if finding.try_command:
            text.append("\ntry: ", style="bright_black").append(one_line(finding.try_command))
        name = Text(finding.id, style=SEVERITY_STYLES[finding.severity])
        table.add_row(name, _share(finding), text)
    return table


def _share(finding: Finding) -> str:
    """The share of the step, or of what the finding names."""
    if finding.of in ("step", "trace"):
        return percent(finding.share)
    return f"{percent(finding.share)} {finding.of}" if finding.share >= 0.005 else ""


def _kernels(rank: RankExplanation, top: int, width: int) -> Table:
    title = "operators by self time" if rank.launches.device_events == 0 else "kernels"
    table = titled_table(title, ">total", ">share", ">calls", "kind", "name")
    whole = sum(kernel.total_ns for kernel in rank.kernels) or 1
    for kernel in rank.kernels[:top]:
        table.add_row(
            duration(kernel.total_ns),
            percent(kernel.total_ns / whole),
            str(kernel.count),
            kernel.kind,
            short_kernel(kernel.name, max(16, width - 40)),
        )
    return table


def _operators(rank: RankExplanation, top: int, width: int) -> Table:
    on_device = rank.launches.device_events > 0
    columns = [">device", ">CPU self"] if on_device else [">self time"]
    columns += [">calls", "operator", *(["shapes"] if width >= 90 else [])]
    table = titled_table("operators by input shapes", *columns)
    rows = rank.operators if on_device else sorted(rank.operators, key=lambda o: -o.host_self_ns)
    for operator in rows[:top]:
        cells = [
            duration(operator.device_self_ns),
            duration(operator.host_self_ns),
            str(operator.calls),
            short_kernel(operator.name, max(20, width // 3)),
        ]
        if width >= 90:
            cells.append(short_kernel(operator.shapes, width // 3))
        table.add_row(*cells[0 if on_device else 1 :])
    return table


def _copies(rank: RankExplanation, top: int, width: int) -> Table:
    table = titled_table("copies", ">total", ">exposed", ">calls", ">size", ">rate", "name")
    for copy in rank.copies[: min(top, 5)]:
        table.add_row(
            duration(copy.total_ns),
            duration(copy.exposed_ns),
            str(copy.count),
            or_dash(copy.size_bytes, size),
            or_dash(copy.gb_s, lambda gb_s: byte_rate(1e9 * gb_s)),
            short_kernel(copy.name, max(16, width - 55)),
        )
    return table


def _notes(explanation: Explanation) -> list[RenderableType]:
    several = len(explanation.ranks) > 1
    notes = [note.detail for note in explanation.quality]
    for rank in explanation.ranks[:8]:
        whose = f"{rank.called}: " if several else ""
        notes += [f"{whose}{note.detail}" for note in rank.quality]
    return [*map(note_line, notes)]


# What was tried on the step, in a few lines: what helps, with numbers, and what does not.

_MOST = 5


def advice_table(advice: Sequence[Advice]) -> Table:
    """The best first; `whatif` tells more of each."""
    helping = [change for change in advice if change.verdict == "faster"]
    table = titled_table("what-ifs, predicted", "gain", ">step becomes", "what")
    for change in helping[:_MOST]:
        text = text_line(change.label)
        if change.tried is not None:
            text.append(f"  {change.tried.label}: {one_line(change.tried.words)}")
            saved = change.tried.saved(change.tried.measured_ms)
            table.add_row(or_dash(saved, milliseconds), "", text)
            continue
        text.append(f"  --set {change.setting}", style="bright_black")
        ends = interval(change.low_ms, change.high_ms)
        step = f"{milliseconds(change.predicted_ms)} ({ends})"
        table.add_row(" ".join(filter(None, change.gain.words())), step, text)
    for note in not_helping(advice):
        table.add_row("", "", text_line(note, style="bright_black"))
    return table


# Efficiency in a terminal: MFU, the dtypes that did the work, and the widest gaps to the roof.

MOST_GAPS = 5
_WIDE = 80
_FIXED = 52  # characters taken by everything but names and shapes


def efficiency_sections(efficiency: Efficiency, *, width: int) -> list[RenderableType]:
    """The line about MFU, and the tables that have rows."""
    out: list[RenderableType] = [_efficiency_headline(efficiency)]
    if efficiency.by_dtype:
        out.append(_dtypes(efficiency, width))
    out.append(Text())
    if gaps(efficiency, 1):
        out += [_gaps(efficiency, width), Text()]
    return out


def _efficiency_headline(efficiency: Efficiency) -> Text:
    text = Text("efficiency  ", style="bold")
    text.append(efficiency_headline(efficiency), style="")
    wrong = bool(above_peak(efficiency))
    if efficiency.hfu is not None and efficiency.recomputed_flops and not wrong:
        text.append(f", HFU {percent(efficiency.hfu)} counting recomputed work")
    if efficiency.mfu is not None and not wrong:
        text.append(f"\n{MFU_WORDS} {against_fastest(efficiency)}".rstrip(), style="bright_black")
    if efficiency.unknown_share >= 0.05:
        text.append(
            f" {percent(efficiency.unknown_share)} of device time is in kernels whose FLOPs are "
            "not known.",
            style="bright_black",
        )
    return text


def _dtypes(efficiency: Efficiency, width: int) -> Table:
    columns = ["dtype", ">time", ">rate", ">of peak"]
    if width >= _WIDE:
        columns += [">FLOPs per step", ">tensor cores"]
    table = titled_table("", *columns)
    for use in efficiency.by_dtype:
        reached = use.flops / (use.device_ns / 1e9) if use.device_ns else None
        known = use.device_ns and efficiency.tensor_core_share is not None
        cells = [
            use.dtype,
            duration(use.device_ns),
            "-" if reached is None else flop_rate(reached),
            "-"
            if reached is None or not use.peak_flops
            else share_of_peak(reached / use.peak_flops),
            flops(use.flops),
            percent(use.tensor_core_ns / use.device_ns) if known else "-",
        ]
        table.add_row(*cells[: len(columns)])
    return table


def _gaps(efficiency: Efficiency, width: int) -> Table:
    columns = [">gap", ">time", ">of roof", "bound", "dtype", "operator"]
    if width >= 90:
        columns.append("shapes, line")
    table = titled_table("widest gaps to the roof, per step", *columns)
    room = max(28, width - _FIXED)
    for spot in gaps(efficiency, MOST_GAPS):
        cells = [
            duration(spot.gap_ns or 0.0),
            duration(spot.device_ns),
            share_of_roof(spot),
            spot.bound,
            spot.dtype or "-",
            short_kernel(spot.operator, room * 4 // 7),
        ]
        if width >= 90:
            cells.append(short_kernel(which_call(spot), room * 3 // 7))
        table.add_row(*cells)
    return table


# What torch.compile did, in a terminal: its graphs by line, breaks, and what it compiled again.

_LINES_OF_ONE = 3


def compiled_sections(compiled: CompiledWork, *, top: int, width: int) -> list[RenderableType]:
    """Only what there is."""
    out: list[RenderableType] = []
    if compiled.regions:
        out += [_regions(compiled.regions[:top], width), *_explained_share(compiled), Text()]
    if compiled.breaks:
        out += [_breaks(compiled, top, width), Text()]
    if compiled.recompiled:
        out += [_recompiled(compiled, top, width), Text()]
    for eager in compiled.eager[:top]:
        out.append(
            text_line(f"not compiled: {eager.function} {where(eager.place)}: {eager.reason}")
        )
    out += [text_line(note) for note in compiled.notes]
    return out


def _explained_share(compiled: CompiledWork) -> list[RenderableType]:
    if compiled.operator_share is None or compiled.line_share is None:
        return []
    return [
        text_line(
            f"{percent(compiled.operator_share)} of that time has a known operator, "
            f"{percent(compiled.line_share)} a source line"
        )
    ]


def where(place: Place | None) -> str:
    """`train.py:12`, or a dash."""
    return place.short if place else "-"


def _regions(regions: tuple[RegionTime, ...], width: int) -> Table:
    rows = []
    for region in regions:
        which = "backward" if region.backward else "forward"
        known = flops(region.flops) if region.flops is not None else "-"
        rows.append((f"{region.region or '?'} {which}", milliseconds(region.ms), known, ""))
        rows += [
            (
                f"  {where(line.place)}",
                milliseconds((line.share or 0.0) * region.ms),
                flops(line.flops) if line.flops is not None else "-",
                ", ".join(name.removeprefix("aten::") for name in line.operators[:_LINES_OF_ONE]),
            )
            for line in region.lines[:_LINES_OF_ONE]
        ]
    columns = ("compiled graph, line", ">per step", ">FLOPs", "operators")
    return fitting_table("Compiled graphs", columns, rows, width=width, spare=("operators",))


def _breaks(compiled: CompiledWork, top: int, width: int) -> Table:
    rows = [
        (
            where(one.place),
            milliseconds(one.cost_ms) if one.cost_ms is not None else "-",
            one.reason,
        )
        for one in compiled.breaks[:top]
    ]
    return fitting_table(
        "Graph breaks", ("line", ">per step", "what"), rows, width=10 * width, spare=()
    )


def _recompiled(compiled: CompiledWork, top: int, width: int) -> Table:
    rows = [
        (
            f"{one.function} {where(one.place)}",
            f"{one.times:,}",
            duration(1e9 * one.seconds),
            percent(one.seconds / compiled.compile_s) if compiled.compile_s else "-",
            "; ".join(guard.guard for guard in one.guards[:_LINES_OF_ONE]),
        )
        for one in compiled.recompiled[:top]
    ]
    columns = ("function", ">times", ">took", ">of compiling", "what")
    return fitting_table("Compiled again", columns, rows, width=10 * width, spare=())
