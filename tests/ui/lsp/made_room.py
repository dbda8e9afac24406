"""A language server whose profiles are made up: `# 3.5 ms` at a line's end is what it costs.

python made_room.py    serves standard input and output, as `stepscope lsp` does

A script with `# hangs` keeps its profile running until it is stopped; `# fails` has no training.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from stepscope.errors import NotCapturedError
from stepscope.records.source_lines import (
    BatchPoint,
    LineCost,
    LineCosts,
    LineKernel,
    LineOperator,
    Place,
)
from stepscope.ui.editor.profile_child import ProfiledScript
from stepscope.ui.lsp.measured_run import FindingNote, MeasuredRun, OfferedPatch, StepWhatIf
from stepscope.ui.lsp.script_jobs import ScriptWork, WorkRoom

_COST = re.compile(r"# ([\d.]+) ms")
_TEXT = "script.txt"


class MadeRoom(WorkRoom):
    def profile(self, work: ScriptWork, folder: Path, stop: threading.Event) -> ProfiledScript:
        text = work.script.read_text()
        folder.mkdir(parents=True)
        (folder / _TEXT).write_text(text)
        until = time.monotonic() + work.settings.limit_s
        while "# hangs" in text and not stop.wait(0.02):
            if time.monotonic() > until:
                return ProfiledScript(failed="ended after its limit")
        if "# fails" in text:
            return ProfiledScript(failed="it has no training step", output=("oops",))
        print("this must not reach the protocol", flush=True)  # noqa: T201
        return ProfiledScript(run=str(folder))

    def estimate(
        self,
        work: ScriptWork,
        texts: Mapping[Path, str],
        measured: LineCosts,
        stop: threading.Event,
    ) -> LineCosts:
        assert measured.kind == "measured"
        text = texts.get(work.script, "")
        if "# cannot" in text or stop.is_set():
            raise NotCapturedError("its data is missing")
        return made_costs(work.script, text, kind="estimated")

    def read(self, run: Path, script: Path, stop: threading.Event) -> MeasuredRun:
        del stop
        return made_run(script, (run / _TEXT).read_text(), run)

    def write_report(self, run: Path, report: Path, stop: threading.Event) -> None:
        del run, stop
        report.write_text("<html>")


def made_costs(
    script: Path, text: str, kind: str = "measured", run: str | None = None
) -> LineCosts:
    marked = [
        (number, float(match[1]))
        for number, line in enumerate(text.split("\n"), 1)
        if (match := _COST.search(line))
    ]
    step_ms = sum(ms for _, ms in marked) + 1.0
    lines = [
        LineCost(
            file=str(script),
            line=number,
            function="train",
            forward_ms=ms / 4,
            backward_ms=ms * 3 / 4,
            share=ms / step_ms,
            kept_bytes=2_000_000,
            calls=2.0,
            operators=(
                LineOperator(name="aten::mm", calls=2.0, ms=ms, shapes="[[8, 8], [8, 8], [], []]"),
            ),
            kernels=(LineKernel(name="gemm", ms=ms),),
        )
        for number, ms in marked
    ]
    return LineCosts(
        lines=tuple(lines),
        step_ms=step_ms,
        other_ms=1.0,
        verdict="Matrix products in fp32",
        kind=kind,
        run=run,
        batch=64,
        texts={str(script): text},
    )


def made_run(script: Path, text: str, run: Path) -> MeasuredRun:
    costs = made_costs(script, text, run=str(run))
    patches = []
    if "lr=1e-3)" in text:
        after = text.replace("lr=1e-3)", "lr=1e-3, fused=True)")
        patches.append(
            OfferedPatch(
                id="fused-optimizer",
                action="use a fused optimizer",
                effect="rounding",
                after={str(script): after},
                findings=("many-small-kernels",),
                saved_ms=1.25,
            )
        )
    optimizer = next((n for n, line in enumerate(text.split("\n"), 1) if "optimizer =" in line), 1)
    finding = FindingNote(
        id="many-small-kernels",
        title="Many small kernels",
        severity="high",
        summary="the optimizer takes 30% of the step.",
        places=(Place(file=str(script), line=optimizer),),
        remedies=("use fused=True",),
    )
    points = [
        BatchPoint(
            batch=batch,
            step_ms=batch / 8,
            low_ms=batch / 9,
            high_ms=batch / 7,
            samples_per_second=1000.0 * batch / (batch + 64),
            peak_bytes=1_000_000 * batch,
        )
        for batch in (16, 32, 64, 128, 256)
    ]
    return MeasuredRun(
        costs=costs,
        low_ms=costs.step_ms * 0.9,
        high_ms=costs.step_ms * 1.1,
        findings=(finding,),
        whatifs=(
            StepWhatIf(label="bf16", setting="precision=bf16", gain="saves 2.00 ms (1.00 to 3.00)"),
        ),
        memory={"parameters": 1_000_000, "activations": 4_000_000, "other": None},
        peak_bytes=10_000_000,
        capacity_bytes=80_000_000,
        batch=64,
        curve=tuple(points),
        patches=tuple(patches),
        report=str(run / "report.html"),
    )


if __name__ == "__main__":
    from stepscope.ui.lsp.serve_editor import serve_stdio

    serve_stdio(MadeRoom())
