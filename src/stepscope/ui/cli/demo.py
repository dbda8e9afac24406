"""stepscope demo: train a small model here and explain it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from stepscope.errors import StepscopeError, UsageError
from stepscope.ui.cli.options import json_option, out_option, verb
from stepscope.ui.jobs.environment import own_ranks

RANKS = 2


@verb(
    "demo",
    examples=(
        ("stepscope demo", "Train for a few seconds, then print where the steps' time went"),
        ("stepscope demo --out first-look", "Put the recording and the report into this folder"),
    ),
)
@out_option("Folder for the recording and the report (default: a new stepscope-demo folder here).")
@json_option
def command(out: Path | None, as_json: bool) -> None:
    """Train a small model in two CPU processes, one with slow input, and explain it.

    It does what `stepscope run -- torchrun ...` does. It needs no GPU and no network.
    """
    if find_spec("torch") is None:
        raise UsageError("demo trains a model and needs PyTorch: pip install torch")
    from stepscope.measure.settings import Settings
    from stepscope.ui.api import explain_paths
    from stepscope.ui.jobs.capture import capture

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks share this machine
    try:
        folder = _new_folder(out)
    except OSError as error:
        raise UsageError(f"cannot make a folder for the recording: {error}") from None
    settings = Settings(folder=str(folder.absolute()), wait=12, warmup=1, active=5, stacks=True)
    training = tuple(own_ranks(RANKS, "stepscope.bench.demo"))
    code, ranks = capture(training, folder, settings, output=sys.stderr.fileno())
    if code:
        raise StepscopeError(f"the demo's training ended with code {code}; see {folder}")
    for rank in ranks:
        for name, why in rank["missing"].items():
            raise StepscopeError(f"rank {rank['rank']} left no {name}: {why}")
    report = folder / "report.html"
    explanation = explain_paths((folder,), cache=False, html=report, quiet=as_json)
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.topics.explanation_json import explanation_json

        write_json(explanation_json(explanation))
        return
    from stepscope.ui.terminal.short import print_short

    print_short(
        explanation, more=f"stepscope explain {shlex.quote(str(folder))} --full", report=report
    )


def _new_folder(out: Path | None) -> Path:
    """Return `out`, or the first stepscope-demo folder that does not exist yet."""
    from stepscope.ui.jobs.run_folder import claim_or_refuse

    if out is not None:
        return claim_or_refuse(out, ())
    for number in range(1, 10_000):
        folder = Path("stepscope-demo" if number == 1 else f"stepscope-demo-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise UsageError("too many stepscope-demo folders here: remove some or use --out")
