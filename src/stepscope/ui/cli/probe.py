"""stepscope probe: time a step's operators one by one on this machine."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import TIME, json_option, no_cache_option, paths_argument, verb
from stepscope.ui.json_text import write_json


@verb(
    "probe",
    examples=(
        ("stepscope probe stepscope-runs/my-run", "Time the operators of a recorded step"),
        (
            "stepscope probe stepscope-runs/my-run --set precision=bf16 --budget 1m",
            "Also time them in bf16, for one minute",
        ),
        ("stepscope probe show", "Count the times measured so far"),
    ),
    modes={"show": "library", "export": "library", "import": "library"},
)
@paths_argument
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Also time the operators in another precision (precision=tf32, bf16 or fp16) or with "
    "another batch size (batch=x2). Repeatable.",
)
@click.option(
    "--budget",
    default="20s",
    show_default=True,
    type=TIME,
    help="Stop after this long. The most expensive operators come first.",
)
@json_option
@no_cache_option
def command(
    paths: tuple[str, ...],
    settings: tuple[str, ...],
    budget: float,
    as_json: bool,
    no_cache: bool,
) -> None:
    """Time the operators of a recorded step one by one on this machine.

    Each operator runs alone, forward and backward, on random tensors of the recorded shapes.
    `whatif` then predicts precision and batch size from these times.

    PATHS are a run folder, a trace or a folder of traces. Of several ranks, the slowest is probed.

    `probe show` counts the times measured so far. `probe export FILE` and `probe import FILE` carry
    them to another machine.
    """
    from stepscope.records.prediction import Setting
    from stepscope.ui.api import open_bench
    from stepscope.ui.probe import ProbeChild, modes_of, probe_step
    from stepscope.ui.progress import shown_shares
    from stepscope.ui.topics.measurements import probe_json

    modes = modes_of([Setting.parse(text) for text in settings])
    if find_spec("torch") is None:
        raise UsageError("probe measures with PyTorch: pip install torch")
    bench, _, _ = open_bench(*paths, cache=not no_cache, quiet=as_json)
    context = bench.context
    load = context.cpu.load if context.cpu else None
    with ProbeChild(load.threads if load else 0) as child, shown_shares(quiet=as_json) as show:
        report = probe_step(context, modes, child, budget_s=budget, show=show)
    if as_json:
        write_json(probe_json(report))
        return
    from stepscope.ui.terminal.measurements import print_probe

    print_probe(report, path=shlex.join(paths))
