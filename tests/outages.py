"""Jobs that are interrupted: run bare and captured, with everything that must hold for both."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import stepscope
from stepscope.errors import StepscopeError

STEPS = 16
TRAINING = r"""
import os, signal, sys, time
GO = os.environ.get("OUTAGE_GO", "")
def here(name):
    print(f"at {{name}}\n", end="", flush=True)  # in one piece: other threads print too
    ends = time.monotonic() + (30 if GO else 0)
    while time.monotonic() < ends and not os.path.exists(GO):
        time.sleep(0.02)
{before}
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
{ready}
for step in range(16):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{{loss.item().hex()}}\n", end="", flush=True)
{inside}
{after}
"""
WINDOW = ("--wait", "4", "--warmup", "1", "--active", "2")


def training(before: str = "", ready: str = "", inside: str = "", after: str = "") -> str:
    """A script of 16 steps whose losses are the same each time."""
    parts = {"before": before, "ready": ready, "after": after}
    dedented = {name: textwrap.dedent(part) for name, part in parts.items()}
    return TRAINING.format(inside=textwrap.indent(textwrap.dedent(inside), "    "), **dedented)


@cache
def bare_losses() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", training()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("0x")]


class Job:
    """A script in a folder of its own, with a home and temporary folder to watch."""

    def __init__(self, tmp_path: Path, text: str) -> None:
        self.place = tmp_path / "job"
        (self.place / "home").mkdir(parents=True)
        # Sockets in this folder need short names.
        self.temporary = Path(tempfile.mkdtemp(prefix="job-"))
        weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)
        self.script = self.place / "train.py"
        self.script.write_text(text)
        self.out = self.place / "run"
        self.go = tmp_path / "go"

    @property
    def environment(self) -> dict[str, str]:
        own = {"HOME": str(self.place / "home"), "TMPDIR": str(self.temporary)}
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHON_COLORS": "0"}
        return {**os.environ, **own, **quiet}

    def bare(self) -> list[str]:
        return [sys.executable, str(self.script)]

    def captured(self, *options: str, out: Path | None = None) -> list[str]:
        ours = [sys.executable, "-m", "stepscope", "run", "--out", str(out or self.out)]
        return [*ours, *WINDOW, "--no-explain", *options, "--", *self.bare()]

    def call(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"env": self.environment, "cwd": self.place, **options}
        return subprocess.run(command, capture_output=True, text=True, timeout=400, **options)

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.place,
            env={**self.environment, "OUTAGE_GO": str(self.go)},
            start_new_session=True,
            **options,
        )


def shell_code(code: int) -> int:
    """The exit code as a shell reports it."""
    return code if code >= 0 else 128 - code


def check_folder(out: Path) -> str:
    """The folder can be explained, or says why not; no file is unfinished. Returns the answer."""
    hidden = [str(file) for file in out.rglob(".*")]
    assert not hidden, hidden
    try:
        explanation = stepscope.explain_job(out)
    except StepscopeError as problem:
        if problem.exit_code not in (3, 4):
            raise
        return str(problem)
    return "; ".join(note.detail for note in explanation.quality)


def check_nothing_else(job: Job) -> None:
    """Nothing was written outside the run folder, and no process that uses it is left."""
    outside = {
        str(file.relative_to(job.place))
        for file in job.place.rglob("*")
        if not file.is_relative_to(job.out)
    }
    outside |= {file.name for file in job.temporary.iterdir() if "torch" not in file.name}
    unexpected = outside - {"home", "train.py"}
    assert not unexpected, sorted(unexpected)
    ends = time.monotonic() + 10
    while processes_of(job.place) and time.monotonic() < ends:
        time.sleep(0.05)
    left = processes_of(job.place)
    assert not left, left


def processes_of(place: Path) -> list[str]:
    """Command lines of processes that name the folder, in their arguments or their environment."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if int(process.name) != os.getpid() and words:
                known = words + (process / "environ").read_bytes()
                if f"{place}/".encode() in known and b"pytest" not in words:
                    commands.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return commands
