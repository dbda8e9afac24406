"""A probe of a run that has just ended: nothing here fails what it follows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.figures import percent
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.probe_report import ProbeReport

REPORT = "probe.json"


def asked_precisions(settings: Sequence[str], *, probe: bool) -> tuple[str, ...]:
    """What `run --probe --set ...` asks for; UsageError before the command starts."""
    if settings and not probe:
        raise UsageError("--set needs --probe: stepscope run --probe --set precision=bf16")
    if not settings:
        return ()
    from stepscope.records.prediction import Setting
    from stepscope.ui.probe import modes_of

    return modes_of([Setting.parse(text) for text in settings])


def probe_run(
    folder: Path, precisions: Sequence[str], budget_s: float, *, on_cpu: bool = True
) -> str:
    """Time the operators of a run folder's step, keep the report there, and say how it went. Empty
    if the step ran `on_cpu` and nobody wants that."""
    from stepscope.ui.probe import probe_step
    from stepscope.ui.probe_child import ProbeChild
    from stepscope.ui.slowest_bench import open_slowest

    if find_spec("torch") is None:
        return "no operator was timed: stepscope's Python has no torch"
    try:
        context = open_slowest(str(folder), cache=True)[0].context
        if context.on_host and not on_cpu:
            return ""
        load = context.cpu.load if context.cpu else None
        with ProbeChild(load.threads if load else 0) as child:
            report = probe_step(context, precisions, child, budget_s=budget_s)
        _write(folder, report)
    except StepscopeError as error:
        return f"no operator was timed: {error}"
    except Exception as error:
        return f"no operator was timed: a defect in stepscope: {type(error).__name__}: {error}"
    timed = sum(row.probed_ms is not None for row in report.operators)
    if not timed:
        longest = [f"{row.name}: {row.why}" for row in report.unprobed]
        return f"no operator was timed: {longest[0] if longest else 'the step has no operator'}"
    notes = "".join(f"; {note}" for note in report.notes)
    return (
        f"probed {counted(timed, 'distinct call')} on {report.place}, "
        f"{percent(report.probed_share)} of the step's operators{notes}"
    )


def _write(folder: Path, report: ProbeReport) -> None:
    from stepscope.measure import folder as layout
    from stepscope.ui.probe_json import probe_json

    layout.try_write_json(folder / REPORT, probe_json(report))
