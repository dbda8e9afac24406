"""The options of `python -m stepscope.bench.train`, which a saved run's command is read by too."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepscope.bench.workload import SIZES


def options_parser(description: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepscope.bench.train", description=description)
    parser.add_argument("name")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="default: as many as the target allows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    help_losses = "write the loss of every step and the machine's speed to this file"
    parser.add_argument("--losses", type=Path, help=help_losses)
    help_paced = (
        "run SECONDS of steps in turns with a reference load instead, and write the ratio to "
        "--losses"
    )
    parser.add_argument("--paced", type=float, metavar="SECONDS", help=help_paced)
    return parser
