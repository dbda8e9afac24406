"""stepscope gpus: predict the step on every GPU of the table."""

from __future__ import annotations

from pathlib import Path

import click

from stepscope.errors import NotPredictedError
from stepscope.ui.cli.options import json_option, no_cache_option, paths_argument, verb
from stepscope.ui.json_text import write_json


@verb(
    "gpus",
    newer="stepscope whatif PATHS --gpus",
    examples=(
        ("stepscope whatif trace.json.gz --gpus", "Predict the step on every GPU of the table"),
        (
            "stepscope whatif trace.json.gz --gpus --prices prices.csv",
            "Also show samples per unit of money",
        ),
    ),
)
@paths_argument
@click.option(
    "--gpu",
    "names",
    multiple=True,
    metavar="NAME|FILE",
    help="A GPU to predict: a name, a data sheet, or a profile of `calibrate`. Repeatable.",
)
@click.option(
    "--prices",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prices per hour, as lines of GPU,PRICE or as a JSON object.",
)
@json_option
@no_cache_option
def command(
    paths: tuple[str, ...],
    names: tuple[str, ...],
    prices: Path | None,
    as_json: bool,
    no_cache: bool,
) -> None:
    """Predict a recorded training step on other GPUs, from a trace of one.

    PATHS are a run folder, a trace or a folder of traces.
    """
    from stepscope.predict.compare_gpus import compare_gpus, table_gpus
    from stepscope.predict.declaration import Refused
    from stepscope.predict.other_gpu.gpu import find_gpu
    from stepscope.ui.api import open_bench
    from stepscope.ui.topics.gpus import comparison_json, read_prices

    per_hour = read_prices(prices) if prices else None
    gpus = tuple(map(find_gpu, names)) if names else table_gpus()
    bench, _, about = open_bench(*paths, cache=not no_cache, quiet=as_json)
    try:
        comparison = compare_gpus(bench, gpus, per_hour)
    except Refused as reason:
        raise NotPredictedError(f"{paths[0]}: {str(reason).removeprefix('gpu: ')}") from None
    if as_json:
        write_json(comparison_json(comparison))
        return
    from stepscope.ui.terminal.whatif import print_gpus

    print_gpus(comparison, about)
