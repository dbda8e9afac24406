"""Probe a run that has just ended, and start the process that times operators: what crashes
it does not end the probe, and nothing here fails the run.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.hardware import ProbedDevice, ProbeReport
from stepscope.text.figures import percent
from stepscope.text.words import counted
from stepscope.ui.child import ask_line
from stepscope.ui.jobs.environment import own_python

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
    from stepscope.ui.advice import open_slowest
    from stepscope.ui.probe import probe_step

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
    from stepscope.ui.topics.measurements import probe_json

    layout.try_write_json(folder / REPORT, probe_json(report))


_START_S = 120.0  # for torch and a device to come up
_PATIENCE_S = 30.0  # that a call may take beyond the time it was given
_COMMAND = own_python("stepscope.measure.probe")


class ProbeChild:
    """Started at once, so that it loads torch meanwhile, and again after a crash."""

    def __init__(self, threads: int = 0, command: Sequence[str] = _COMMAND) -> None:
        self._threads, self._command = threads, command
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self.crashes = 0

    def __enter__(self) -> ProbeChild:
        self._launch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop()

    def device(self) -> ProbedDevice:
        """Raises StepscopeError if no process comes up."""
        return msgspec.convert(self._start(), ProbedDevice)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; a crash or a hang is an answer with an `error`."""
        if not self._ready:
            self._start()
        answer = self._exchange(request, seconds + _PATIENCE_S)
        if answer is not None:
            return answer
        code = self._stop()
        self.crashes += 1
        if code is None:
            return {"error": f"it did not finish within {seconds + _PATIENCE_S:g} s"}
        return {"error": f"its process ended ({_why(code)})"}

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _start(self) -> dict[str, Any]:
        if self._process is None:
            self._launch()
        answer = self._exchange({"do": "start", "threads": self._threads}, _START_S)
        if answer is None:
            self._stop()
            raise StepscopeError(
                "the process that times operators does not start. Run "
                f"`{shlex.join(_COMMAND)}` to see why"
            )
        self._ready = True
        return answer

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """None if the process ended or the time is over."""
        assert self._process is not None
        try:
            line = json.dumps(request).encode() + b"\n"
            answer: dict[str, Any] = json.loads(ask_line(self._process, line, seconds))
        except OSError:
            return None
        return answer

    def _stop(self) -> int | None:
        """Its exit code if it had ended by itself."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return None
        code: int | None
        _close(process.stdin)  # an idle process ends when nothing more can come
        try:
            code = process.wait(timeout=0.5) if process.poll() is None else process.returncode
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        _close(process.stdout)
        return code


def _close(pipe: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        if pipe:
            pipe.close()


def _why(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"signal {name}"
    return f"exit code {code}"
