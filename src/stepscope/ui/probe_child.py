"""The process that times operators: what crashes it does not end the probe."""

from __future__ import annotations

import contextlib
import json
import selectors
import shlex
import signal
import subprocess
import time
from typing import IO, TYPE_CHECKING, Any

import msgspec

from stepscope.errors import StepscopeError
from stepscope.records.operator_times import ProbedDevice
from stepscope.ui.own_python import own_python

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_START_S = 120.0  # for torch and a device to come up
_PATIENCE_S = 30.0  # that a call may take beyond the time it was given
_COMMAND = own_python("stepscope.measure.probe")


class ProbeChild:
    """Started at once, so that it loads torch meanwhile, and again after a crash."""

    def __init__(self, threads: int = 0, command: Sequence[str] = _COMMAND) -> None:
        self._threads, self._command = threads, command
        self._process: subprocess.Popen[bytes] | None = None
        self._rest, self._ready = b"", False
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
        self._rest = b""

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
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        line = self._read_line(process, time.monotonic() + seconds)
        return None if line is None else json.loads(line)

    def _read_line(self, process: subprocess.Popen[bytes], ends: float) -> bytes | None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = ends - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                piece = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not piece:
                    return None
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

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
