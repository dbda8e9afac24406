"""Train one workload: an ordinary training script, which knows nothing of capture.

python -m stepscope.bench.train NAME [--size tiny] [--steps N] [--seed 0] [--set batch=4]
torchrun --nproc-per-node=2 -m stepscope.bench.train NAME ...
"""

from __future__ import annotations

import json
import math
import os

import msgspec
import torch
import torch.distributed as dist

from stepscope.bench.calibration import time_fixed_work
from stepscope.bench.catalogue import load
from stepscope.bench.computing_and_waiting import StepMarks
from stepscope.bench.training_options import options_parser
from stepscope.bench.workload import TrainingPlace
from stepscope.bench.yardstick import Yardstick, step_over_yardstick


def main() -> None:
    parser = options_parser(__doc__ or "")
    options = parser.parse_args()
    if options.paced and options.losses is None:
        parser.error("--paced writes its ratio to a file, so --losses FILE is needed")
    workload = load(options.name)
    changes = dict(change.split("=", 1) for change in options.set)
    config = workload.config(options.size, changes)
    steps = options.steps or workload.targets[options.size].steps
    place = _place(options.device, options.seed)
    if options.size == "tiny" and place.device.type == "cpu":
        torch.set_num_threads(1)  # several would wait for each other where others use the cores
    pace_ms = time_fixed_work(place.device) if options.losses else None
    torch.manual_seed(options.seed)
    step = workload.build(config, place)
    if options.paced:
        ratio = step_over_yardstick(step, Yardstick(), options.paced)
        ratios = {
            "step_over_yardstick": ratio.step,
            "computing_over_yardstick": ratio.computing,
        }
        options.losses.write_text(json.dumps(ratios))
        return
    alone = place.device.type == "cpu" and place.ranks == 1  # it waits for no device and no rank
    marks = StepMarks.here() if options.losses and alone else None
    # Losses stay on the device: reading each would make the host wait for it.
    losses = []
    for number in range(steps):
        losses.append(step(number).detach())
        if marks is not None:
            marks.step_ended()
    parts = marks.parts() if marks is not None else None
    values = torch.stack([loss.reshape(()) for loss in losses]).tolist()
    if place.rank == 0:
        print(f"{workload.name}: loss {values[0]:.4g} -> {values[-1]:.4g} in {steps} steps")  # noqa: T201
        if options.losses:
            finite = [value if math.isfinite(value) else None for value in values]
            content = {"losses": finite, "calibration_ms": pace_ms, "parts": parts}
            options.losses.write_bytes(msgspec.json.encode(content))
    if place.ranks > 1:
        dist.destroy_process_group()


def _place(wanted: str | None, seed: int) -> TrainingPlace:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return TrainingPlace(device, rank=rank, ranks=ranks, seed=seed)


if __name__ == "__main__":
    main()
