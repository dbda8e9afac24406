"""What a job can see of its own process, and what torch says to it, is the same under capture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
    import torch

    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def train(steps, profiler=None):
        for _ in range(steps):
            optimizer.zero_grad()
            weight.sinh().sum().backward()
            optimizer.step()
            if profiler is not None:
                profiler.step()
"""
LOOKS_AT_ITSELF = (
    TRAIN
    + """
    import faulthandler, gc, json, locale, logging, os, random, signal, subprocess, sys, threading
    import warnings

    def look():
        handled = [(number.name, str(signal.getsignal(number))) for number in signal.Signals]
        return {
            "environment": dict(os.environ),
            "of a child": subprocess.run(["env"], capture_output=True, text=True).stdout,
            "path": sys.path,
            "warnings": [str(each[:4]) for each in warnings.filters],
            "logging": [logging.root.level, len(logging.root.handlers), logging.lastResort.level],
            "signals": [each for each in handled if "0x" not in each[1]],
            "excepthook": sys.excepthook is sys.__excepthook__,
            "threading": threading.excepthook is threading.__excepthook__,
            "tracing": [sys.gettrace() is None, sys.getprofile() is None],
            "threads": [each.name for each in threading.enumerate()],
            "faults": faulthandler.is_enabled(),
            "gc": [gc.get_threshold(), gc.isenabled()],
            "locale": locale.setlocale(locale.LC_ALL),
            "streams": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding],
            "recursion": sys.getrecursionlimit(),
            "switch": sys.getswitchinterval(),
            "torch": [
                torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
                str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
                torch.is_anomaly_enabled(), torch.backends.mkldnn.enabled,
                torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled(),
            ],
            "hooks": [
                len(torch.nn.modules.module._global_forward_hooks),
                len(torch.nn.modules.module._global_forward_pre_hooks),
                torch.autograd.backward.__module__, torch.autograd.grad.__module__,
            ],
            "random": [random.random(), torch.rand(1).item()],
        }

    torch.manual_seed(3)
    random.seed(3)
    looks = [look()]
    train(30)
    looks.append(look())
    print(json.dumps(looks))
"""
)
PROFILES_ITSELF = (
    TRAIN
    + """
    import sys, threading
    from torch.profiler import profile, schedule, tensorboard_trace_handler

    def in_a_thread(*steps):
        thread = threading.Thread(target=train, args=steps)
        thread.start()
        thread.join()

    train(30) if sys.argv[1] == "main" else in_a_thread(30)
    with profile() as profiler:
        train(3)
    profiler.export_chrome_trace(sys.argv[2] + "/own.json")
    print(sum(event.name == "aten::sinh" for event in profiler.events()))
    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    keep = tensorboard_trace_handler(sys.argv[2] + "/board")
    with profile(schedule=plan, on_trace_ready=keep) as profiler:
        train(12, profiler)
    print(weight.sum().item().hex())
"""
)
# What `run` must set so that the job's Python processes find it (docs/explanation/capture.md).
OURS = {"STEPSCOPE_CAPTURE", "PYTHONPATH", "TORCH_FR_BUFFER_SIZE"}
_WHEN = re.compile(r"\S+ \S+ \d+:\d+ |W\d{4} [\d:.]+|\[W.*?\]")


def call(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=variables)


def both(
    folder: Path, text: str, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    (folder / "bare").mkdir()
    (folder / "captured").mkdir()
    command = [sys.executable, str(script), *arguments]
    ours = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-explain"]
    ours += ["--out", str(folder / "run"), "--"]
    bare = call([*command, str(folder / "bare")], **environment)
    captured = call([*ours, *command, str(folder / "captured")], **environment)
    assert (bare.returncode, captured.returncode) == (0, 0), captured.stderr
    return bare, captured


def without_ours(look: dict[str, Any]) -> dict[str, Any]:
    """The rest must be equal. Our entry of the path is the folder of the start-up file."""
    kept = {name: value for name, value in look["environment"].items() if name not in OURS}
    child = [line for line in look["of a child"].splitlines() if line.split("=")[0] not in OURS]
    path = [entry for entry in look["path"] if not entry.endswith("measure/inject")]
    threads = [name for name in look["threads"] if not name.startswith("stepscope-")]
    return look | {"environment": kept, "of a child": child, "path": path, "threads": threads}


def test_a_job_sees_nothing_but_what_is_documented(tmp_path: Path) -> None:
    bare, captured = both(tmp_path, LOOKS_AT_ITSELF)
    before, after = json.loads(bare.stdout), json.loads(captured.stdout)
    for plain, watched in zip(before, after, strict=True):
        assert without_ours(watched) == without_ours(plain)
        added = set(watched["environment"]) - set(plain["environment"])
        assert added <= OURS


def messages(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [_WHEN.sub("", line) for line in done.stderr.splitlines()]
    return [line for line in lines if not line.startswith("stepscope: ")]


def check_own_profilers(folder: Path, where: str, **environment: str) -> None:
    bare, captured = both(folder, PROFILES_ITSELF, where, **environment)
    assert captured.stdout == bare.stdout
    assert messages(captured) == messages(bare)
    assert any("profiler_start" in line for line in messages(bare)) or environment
    written = [
        sorted(p.suffix for p in (folder / kind).rglob("*")) for kind in ("bare", "captured")
    ]
    assert written[0] == written[1]
    assert (folder / "run/rank-00000/trace.json.gz").exists()  # ours was recorded before


def test_a_scripts_own_profilers_say_and_write_what_they_always_do(tmp_path: Path) -> None:
    check_own_profilers(tmp_path, "main")


@pytest.mark.slow
def test_a_log_level_of_the_users_own_is_theirs(tmp_path: Path) -> None:
    check_own_profilers(tmp_path, "main", KINETO_LOG_LEVEL="3")


def test_a_training_in_a_worker_thread_prints_nothing_of_kinetos(tmp_path: Path) -> None:
    """The window is Kineto's first profiler, and it is not the main thread that starts it."""
    check_own_profilers(tmp_path, "thread")
