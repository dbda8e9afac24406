"""As many processes as models, each training one: in turns on the device, or at once under MPS."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

PROCESSES, MPS = "processes", "processes+MPS"
_CONTROL = "nvidia-cuda-mps-control"
_START_S = 20


def train_in_processes(
    command: list[str], models: int, way: str, alone: Callable[[], AbstractContextManager[Any]]
) -> dict[str, Any]:
    """Each worker says "ready", waits for "go", and ends with its steps and seconds as JSON.

    From "go" on they have the device `alone`.
    """
    try:
        with mps() if way == MPS else contextlib.nullcontext({}) as environment:
            return _train(command, models, environment, alone)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """A control program of our own; what a process needs in its environment to use it."""
    if shutil.which(_CONTROL) is None:
        raise RuntimeError(f"{_CONTROL} is not on this machine")
    with tempfile.TemporaryDirectory(prefix="stepscope-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **places}
        subprocess.run([_CONTROL, "-d"], env=environment, check=True, timeout=_START_S)
        try:
            yield places
        finally:
            subprocess.run(
                [_CONTROL],
                input="quit\n",
                text=True,
                env=environment,
                timeout=_START_S,
                check=False,
            )


def _train(
    command: list[str],
    models: int,
    environment: dict[str, str],
    alone: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Any]:
    start = time.monotonic()
    workers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for _ in range(models)
    ]
    try:
        if any(worker.stdout.readline() != "ready\n" for worker in workers):  # type: ignore[union-attr]
            return {"error": "a process ended before it was ready"}
        ready_s = time.monotonic() - start
        with alone():
            for worker in workers:
                worker.stdin.write("go\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
            facts = [json.loads(worker.stdout.readline()) for worker in workers]  # type: ignore[union-attr]
    except (ValueError, OSError) as error:
        return {"error": f"a process failed: {error}"}
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    rate = sum(one["steps"] / one["seconds"] for one in facts)
    return {"ms_a_model_step": 1e3 / rate, "control_ms": None, "ready_s": ready_s}
