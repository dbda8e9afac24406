"""stepscope probe: time a step's operators one by one on this device."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import json_option, no_cache_option, parse_budget
from stepscope.ui.json_text import write_json


@click.command(name="probe")
@click.argument("paths", nargs=-1, required=True)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Also time the operators in this precision (precision=tf32, bf16 or fp16, by autocast) or "
    "with this batch (batch=x2). May be repeated.",
)
@click.option(
    "--budget",
    default="20s",
    show_default=True,
    callback=parse_budget,
    metavar="TIME",
    help="Stop after this long; the most expensive operators come first.",
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
    """Rebuild every operator call of a step with random tensors of its shapes and time it here,
    forward and backward, as traced and in another precision or with another batch.

    The times go into the library of operator times (stepscope library show), and
    `stepscope whatif --set precision=...` and `batch=...` use them instead of their models.

    PATHS are a run folder, a trace or a folder of traces; of several ranks, the slowest is probed.
    """
    from stepscope.records.prediction import Setting
    from stepscope.ui.cli.whatif import open_bench
    from stepscope.ui.probe import modes_of, probe_step
    from stepscope.ui.probe_child import ProbeChild
    from stepscope.ui.probe_json import probe_json
    from stepscope.ui.terminal.progress import shown_shares

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
    from stepscope.ui.terminal.probe import print_probe

    print_probe(report, path=shlex.join(paths))
