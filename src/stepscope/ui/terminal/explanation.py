"""Print the whole explanation (--full): verdict, why, next, the step as one bar, and all tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.explain.efficiency import above_peak
from stepscope.explain.incomplete_ranks import is_server_only, is_untimed
from stepscope.explain.job.rank_part import own_ms, typical_step
from stepscope.records.compiled import CompiledWork, RegionTime
from stepscope.records.explanation import Advice, Budget, Explanation, Finding, RankExplanation
from stepscope.records.hardware import Efficiency, which_call
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
    FAINT,
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
from stepscope.ui.terminal.distributed import (
    host_table,
    job_sections,
    nccl_sections,
    strategy_sections,
    together_sections,
)
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


def _sections(explanation: Explanation, top: int, width: int) -> Iterator[RenderableType]:
    named = explanation.findings[0].rank
    ranks = explanation.ranks
    worst = next((rank for rank in ranks if rank.rank == named), ranks[0])
    # Without a step there is no bar of time: a memory snapshot, or a parameter server alone.
    is_timed = not is_untimed(worst)
    yield text_line(" · ".join(_headline(explanation) if is_timed else _input(worst)), FAINT)
    if is_timed:
        if failed := failed_line(explanation):
            yield text_line(failed, "bold red")
        if applied := applied_line(explanation.origin):
            yield text_line(f"run with {applied}")
    yield from (Text(), _verdict(explanation), Text())
    if is_timed:
        yield budget_bar(explanation.budget, width)
        yield from (_legend(explanation.budget, width), Text())
        if explanation.run is not None:
            yield from run_sections(explanation.run, width)
        yield from _job_sections(explanation, top, width)
    elif worst.memory is not None:
        yield from memory_sections(worst.memory, top=top, width=width)
    if explanation.together is not None:
        yield from together_sections(explanation.together, top)
    yield from (_findings(explanation.findings), Text())
    if is_timed:
        if explanation.advice:
            yield from (advice_table(explanation.advice), Text())
        yield from _rank_sections(worst, max(len(ranks), worst.world_size or 1), top, width)
    yield from (note_line(note.detail) for note in explanation.quality)
    for rank in ranks[:8]:
        whose = f"{rank.called}: " if len(ranks) > 1 else ""
        yield from (note_line(f"{whose}{note.detail}") for note in rank.quality)


def _job_sections(explanation: Explanation, top: int, width: int) -> Iterator[RenderableType]:
    job = explanation.job
    if len(explanation.ranks) > 1:
        yield from (_ranks(explanation.ranks), Text())
        if job is not None and (hosts := host_table(job)) is not None:
            yield from (hosts, Text())
    if job is not None:
        yield from job_sections(job, top, width)
        yield from strategy_sections(explanation.strategies, job.hierarchical, top=top, width=width)
        if explanation.nccl:
            yield from nccl_sections(explanation.nccl, top=top, width=width)


def _rank_sections(
    rank: RankExplanation, ranks: int, top: int, width: int
) -> Iterator[RenderableType]:
    """What fills one rank's step."""
    if rank.efficiency is not None:
        yield from efficiency_sections(rank.efficiency, width=width)
    if rank.memory is not None:
        yield from memory_sections(rank.memory, top=top, width=width, ranks=ranks)
    if rank.compiled is not None:
        yield from _compiled_sections(rank.compiled, top, width)
    yield from (_kernels(rank, top, width), Text())
    if rank.operators:
        yield from (_operators(rank, top, width), Text())
    if rank.copies and width > 70:
        rows = [
            (
                duration(copy.total_ns),
                duration(copy.exposed_ns),
                str(copy.count),
                or_dash(copy.size_bytes, size),
                or_dash(copy.gb_s, lambda gb_s: byte_rate(1e9 * gb_s)),
                short_kernel(copy.name, max(16, width - 55)),
            )
            for copy in rank.copies[: min(top, 5)]
        ]
        columns = (">total", ">exposed", ">calls", ">size", ">rate", "name")
        yield from (titled_table("copies", *columns, rows=rows), Text())


def _input(rank: RankExplanation) -> list[str]:
    path = Path(rank.path)
    name, kind = path.name, "memory snapshot"
    if is_server_only(rank):
        name, kind = path.parent.parent.name, "parameter server"
    return [name, kind, counted(rank.events, "event")]


def _headline(explanation: Explanation) -> list[str]:
    first = explanation.ranks[0]
    several = "processes" if first.called.startswith("process") else "ranks"
    alone = len(explanation.ranks) == 1
    name = Path(first.path).name if alone else f"{len(explanation.ranks)} {several}"
    facts = [name, first.device or first.kind.upper()]
    if first.steps.steps:
        facts.append(counted(len(first.steps.steps), "step"))
    return [*facts, _step_words(explanation)]


def _step_words(explanation: Explanation) -> str:
    first = explanation.ranks[0]
    times, step = first.step_ms, milliseconds(explanation.budget.step_ms)
    if times.truth is not None and times.profiled is not None:
        profiled = max(rank.step_ms.profiled or 0.0 for rank in explanation.ranks)
        host = times.host if len(explanation.ranks) == 1 else None
        own = f", {milliseconds(host)} of CPU work" if host is not None else ""
        return f"{step} a step{own}, measured ({milliseconds(profiled)} under the profiler)"
    if first.budget.basis == "corrected":
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
        grid.add_row("also", text_line(explanation.also, style=FAINT))
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
    """One row each under its host; of many ranks the slowest and the fastest."""
    many = len(ranks) > _MOST_RANKS
    several = len({rank.part.host for rank in ranks}) > 1
    first_of: dict[str | None, int] = {}
    for place, rank in enumerate(ranks):
        first_of.setdefault(rank.part.host, place)
    shown = sorted(ranks, key=lambda rank: first_of[rank.part.host])
    if many:
        by_time = sorted(ranks, key=own_ms, reverse=True)
        shown = [*by_time[:_SLOWEST], *by_time[-_FASTEST:]]
    hosts = [one_line(rank.part.host or "-") for rank in shown]
    rows = [_rank_row(rank) for rank in shown]
    if many:
        hosts.insert(_SLOWEST, "…")
        rows.insert(_SLOWEST, ("…", "", "", "", "", "", f"{len(ranks) - _SLOWEST - _FASTEST} more"))
    columns: tuple[str, ...] = (
        *(">rank", ">step", ">w/o comm", ">compute", ">comm", ">idle", "verdict"),
    )
    if several:
        columns = ("host", *columns)
        again = [
            not many and place > 0 and hosts[place - 1] == host for place, host in enumerate(hosts)
        ]
        named = zip(hosts, again, rows, strict=True)
        rows = [("" if is_again else host, *row) for host, is_again, row in named]
    title = "ranks in the recorded steps" + (", slowest first" if many else "")
    return titled_table(title, *columns, rows=rows)


def _rank_row(rank: RankExplanation) -> tuple[str, ...]:
    times = typical_step(rank.part.pace)
    idle_ms = max(0.0, times.own_ms - times.compute_ms)
    parts = (times.compute_ms, times.exposed_comm_ms, idle_ms)
    return (
        rank.called.removeprefix("rank "),
        milliseconds(times.step_ms),
        milliseconds(times.own_ms),
        *(percent(ms / (times.step_ms or 1.0)) for ms in parts),
        rank.findings[0].title if rank.findings else "",
    )


def _findings(findings: tuple[Finding, ...]) -> Table:
    rows = []
    for finding in findings:
        text = text_line(finding.summary)
        for place in finding.where:
            where = one_line(f"{place.file}:{place.line} {place.function}")
            text.append(f"\n{where}", style=FAINT)
        for remedy in finding.remedies:
            if remedy.tried is not None:
                text.append(f"\n{remedy.tried.label}: {one_line(remedy.tried.words)}")
        if finding.try_command:
            text.append("\ntry: ", style=FAINT).append(one_line(finding.try_command))
        share = percent(finding.share)  # of the step, or of what the finding names
        if finding.of not in ("step", "trace"):
            share = f"{share} {finding.of}" if finding.share >= 0.005 else ""
        rows.append((Text(finding.id, style=SEVERITY_STYLES[finding.severity]), share, text))
    title = "findings (stepscope why ID explains one)"
    return titled_table(title, "ID", ">share", "what", rows=rows)


def _kernels(rank: RankExplanation, top: int, width: int) -> Table:
    title = "operators by self time" if rank.launches.device_events == 0 else "kernels"
    whole = sum(kernel.total_ns for kernel in rank.kernels) or 1
    rows = [
        (
            duration(kernel.total_ns),
            percent(kernel.total_ns / whole),
            str(kernel.count),
            kernel.kind,
            short_kernel(kernel.name, max(16, width - 40)),
        )
        for kernel in rank.kernels[:top]
    ]
    return titled_table(title, ">total", ">share", ">calls", "kind", "name", rows=rows)


def _operators(rank: RankExplanation, top: int, width: int) -> Table:
    on_device = rank.launches.device_events > 0
    wide = width >= 90
    columns = [">device", ">CPU self"] if on_device else [">self time"]
    columns += [">calls", "operator", *(["shapes"] if wide else [])]
    ordered = rank.operators if on_device else sorted(rank.operators, key=lambda o: -o.host_self_ns)
    rows = [
        [
            *([duration(operator.device_self_ns)] if on_device else []),
            duration(operator.host_self_ns),
            str(operator.calls),
            short_kernel(operator.name, max(20, width // 3)),
            *([short_kernel(operator.shapes, width // 3)] if wide else []),
        ]
        for operator in ordered[:top]
    ]
    return titled_table("operators by input shapes", *columns, rows=rows)


# What was tried on the step, in a few lines: what helps, with numbers, and what does not.

_MOST = 5


def advice_table(advice: Sequence[Advice]) -> Table:
    """The best first; `whatif` tells more of each."""
    table = titled_table("what-ifs, predicted", "gain", ">step becomes", "what")
    for change in [change for change in advice if change.verdict == "faster"][:_MOST]:
        text = text_line(change.label)
        if change.tried is not None:
            text.append(f"  {change.tried.label}: {one_line(change.tried.words)}")
            saved = change.tried.saved(change.tried.measured_ms)
            table.add_row(or_dash(saved, milliseconds), "", text)
            continue
        text.append(f"  --set {change.setting}", style=FAINT)
        ends = interval(change.low_ms, change.high_ms)
        step = f"{milliseconds(change.predicted_ms)} ({ends})"
        table.add_row(" ".join(filter(None, change.gain.words())), step, text)
    for note in not_helping(advice):
        table.add_row("", "", text_line(note, style=FAINT))
    return table


# Efficiency: MFU, the dtypes that did the work, and the widest gaps to the roof.

MOST_GAPS = 5
_WIDE = 80
_FIXED = 52  # characters taken by everything but names and shapes


def efficiency_sections(efficiency: Efficiency, *, width: int) -> Iterator[RenderableType]:
    """The line about MFU, and the tables that have rows."""
    text = Text("efficiency  ", style="bold")
    text.append(efficiency_headline(efficiency), style="")
    wrong = bool(above_peak(efficiency))
    if efficiency.hfu is not None and efficiency.recomputed_flops and not wrong:
        text.append(f", HFU {percent(efficiency.hfu)} counting recomputed work")
    if efficiency.mfu is not None and not wrong:
        text.append(f"\n{MFU_WORDS} {against_fastest(efficiency)}".rstrip(), style=FAINT)
    if efficiency.unknown_share >= 0.05:
        text.append(
            f" {percent(efficiency.unknown_share)} of device time is in kernels whose FLOPs are "
            "not known.",
            style=FAINT,
        )
    yield text
    if efficiency.by_dtype:
        yield _dtypes(efficiency, width)
    yield Text()
    if gaps(efficiency, 1):
        yield from (_gaps(efficiency, width), Text())


def _dtypes(efficiency: Efficiency, width: int) -> Table:
    columns = ["dtype", ">time", ">rate", ">of peak"]
    if width >= _WIDE:
        columns += [">FLOPs per step", ">tensor cores"]
    rows = []
    for use in efficiency.by_dtype:
        reached = use.flops / (use.device_ns / 1e9) if use.device_ns else None
        of_peak = reached / use.peak_flops if reached is not None and use.peak_flops else None
        known = use.device_ns and efficiency.tensor_core_share is not None
        cells = [
            use.dtype,
            duration(use.device_ns),
            or_dash(reached, flop_rate),
            or_dash(of_peak, share_of_peak),
            flops(use.flops),
            percent(use.tensor_core_ns / use.device_ns) if known else "-",
        ]
        rows.append(cells[: len(columns)])
    return titled_table("", *columns, rows=rows)


def _gaps(efficiency: Efficiency, width: int) -> Table:
    columns = [">gap", ">time", ">of roof", "bound", "dtype", "operator"]
    if width >= 90:
        columns.append("shapes, line")
    room = max(28, width - _FIXED)
    rows = []
    for spot in gaps(efficiency, MOST_GAPS):
        cells = [
            duration(spot.gap_ns or 0.0),
            duration(spot.device_ns),
            share_of_roof(spot),
            spot.bound,
            spot.dtype or "-",
            short_kernel(spot.operator, room * 4 // 7),
            short_kernel(which_call(spot), room * 3 // 7),
        ]
        rows.append(cells[: len(columns)])
    return titled_table("widest gaps to the roof, per step", *columns, rows=rows)


# What torch.compile did: its graphs by line, breaks, and what it compiled again.

_LINES_OF_ONE = 3


def _compiled_sections(compiled: CompiledWork, top: int, width: int) -> Iterator[RenderableType]:
    if compiled.regions:
        yield _regions(compiled.regions[:top], width)
        if compiled.operator_share is not None and compiled.line_share is not None:
            yield text_line(
                f"{percent(compiled.operator_share)} of that time has a known operator, "
                f"{percent(compiled.line_share)} a source line"
            )
        yield Text()
    # Reasons and guards are sentences: these tables may be as wide as they need.
    if compiled.breaks:
        breaks = [
            (_where(one.place), or_dash(one.cost_ms, milliseconds), one.reason)
            for one in compiled.breaks[:top]
        ]
        yield titled_table("Graph breaks", "line", ">per step", "what", rows=breaks)
        yield Text()
    if compiled.recompiled:
        rows = [
            (
                f"{one.function} {_where(one.place)}",
                f"{one.times:,}",
                duration(1e9 * one.seconds),
                percent(one.seconds / compiled.compile_s) if compiled.compile_s else "-",
                "; ".join(guard.guard for guard in one.guards[:_LINES_OF_ONE]),
            )
            for one in compiled.recompiled[:top]
        ]
        columns = ("function", ">times", ">took", ">of compiling", "what")
        yield from (titled_table("Compiled again", *columns, rows=rows), Text())
    for eager in compiled.eager[:top]:
        where = _where(eager.place)
        yield text_line(f"not compiled: {eager.function} {where}: {eager.reason}")
    yield from map(text_line, compiled.notes)


def _where(place: Place | None) -> str:
    return or_dash(place, lambda place: place.short)


def _regions(regions: tuple[RegionTime, ...], width: int) -> Table:
    rows = []
    for region in regions:
        which = f"{region.region or '?'} {'backward' if region.backward else 'forward'}"
        rows.append((which, milliseconds(region.ms), or_dash(region.flops, flops), ""))
        for line in region.lines[:_LINES_OF_ONE]:
            operators = (name.removeprefix("aten::") for name in line.operators[:_LINES_OF_ONE])
            ms = milliseconds((line.share or 0.0) * region.ms)
            known = or_dash(line.flops, flops)
            rows.append((f"  {_where(line.place)}", ms, known, ", ".join(operators)))
    columns = ("compiled graph, line", ">per step", ">FLOPs", "operators")
    return fitting_table("Compiled graphs", columns, rows, width=width, spare=("operators",))
