"""One rank of small DDP trainings: python together_ranks.py RANK RANKS FOLDER CHECK...

Each check is a function of this file; what it returns is written to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from stepscope.errors import UsageError
from stepscope.fix.ddp import (
    BucketTuner,
    accumulate,
    link_groups,
    round_robin_hook,
    set_buckets,
    tune_buckets,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small": {"bucket_cap_mb": 0.01},
}


class Training:
    """Six layers of 17 kB; always the same weights, and data of its own on every rank."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.ddp = DistributedDataParallel(self.net, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self._draw = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[str] = []

    def loss(self) -> torch.Tensor:
        return self.ddp(torch.randn(4, 64, generator=self._draw)).square().mean()

    def step(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item().hex())

    def buckets(self) -> str:
        data = self.ddp._get_ddp_logging_data()
        sizes: str = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return sizes


def tuned_and_not() -> dict[str, Any]:
    return {name: _tuned_and_not(OPTIONS[name]) for name in ("small", "unused")}


def tuned_and_not_otherwise() -> dict[str, Any]:
    return {name: _tuned_and_not(OPTIONS[name]) for name in ("plain", "views", "static")}


def _tuned_and_not(options: dict[str, Any]) -> dict[str, Any]:
    plain, tuned = Training(**options), Training(**options)
    reports: list[str] = []
    tuner = tune_buckets(tuned.ddp, tuned.optimizer, report=reports.append)
    while tuner.result is None:
        plain.step()
        tuned.step()
    for _ in range(3):
        plain.step()
        tuned.step()
    return {
        "same": plain.losses == tuned.losses,
        "steps": tuner.result.steps,
        "after": str(tuner.result.after),
        "buckets": tuned.buckets(),
        "own_buckets": plain.buckets(),
        "reports": reports,
    }


def decisions() -> dict[str, Any]:
    """Tuners whose clock counts buckets, or nothing at all."""
    return {
        "many": _with_clock(lambda buckets: 100 - 10 * buckets),
        "few": _with_clock(lambda buckets: 100 + 10 * buckets),
        "alike": _with_clock(lambda _buckets: 100, find_unused_parameters=True),
    }


def _with_clock(cost: Any, **options: Any) -> dict[str, Any]:
    training = Training(bucket_cap_mb=0.05, **options)
    for _ in range(3):  # DDP notes its buckets in the third
        training.step()
    before = training.buckets()
    clock = [0]
    slower = 3 * dist.get_rank()  # the ranks' own clocks differ

    class CountingTuner(BucketTuner):
        def _now(self) -> int:
            return clock[0]

    tuner = CountingTuner(training.ddp, lambda _text: None)
    while tuner.result is None:
        training.step()
        clock[0] += cost(len(training.buckets().split(","))) + slower
        tuner.step()
    training.step()
    training.step()
    return {
        "before": before,
        "after": training.buckets(),
        "changed": tuner.result.is_changed,
        "tried": [one.buckets for one in tuner.result.tried],
    }


def round_robin() -> dict[str, Any]:
    plain, turns = Training(bucket_cap_mb=0.02), Training(bucket_cap_mb=0.02)
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    turns.ddp.register_comm_hook(None, round_robin_hook(groups))
    tuner = tune_buckets(turns.ddp, turns.optimizer, report=lambda _text: None)
    while tuner.result is None:
        plain.step()
        turns.step()
    return {
        "same": plain.losses == turns.losses,
        "hook": turns.ddp._get_ddp_logging_data()["comm_hook"],
    }


def round_robin_of_any_ranks() -> dict[str, Any]:
    found = {}
    for name, options in OPTIONS.items():
        plain, turns = Training(**options), Training(**options)
        groups = [dist.new_group(backend="gloo") for _ in range(2)]
        turns.ddp.register_comm_hook(None, round_robin_hook(groups))
        for _ in range(6):
            plain.step()
            turns.step()
        found[name] = plain.losses == turns.losses
    return found


def accumulation() -> dict[str, Any]:
    """Whole numbers and powers of two: no sum rounds, in whatever order it is made."""
    draw = torch.Generator().manual_seed(1)
    ranks, passes, batch = dist.get_world_size(), 4, 8
    inputs = torch.randint(-4, 5, (ranks * passes * batch, 16), generator=draw).float()
    weights = torch.randint(-4, 5, (8, 16), generator=draw).float()
    large, small = (nn.Linear(16, 8, bias=False) for _ in range(2))
    for model in (large, small):
        model.weight.data.copy_(weights)
    large(inputs).square().mean().backward()
    exchanges: list[int] = []

    def count(_state: Any, bucket: Any) -> Any:
        exchanges.append(bucket.index())
        return plain(None, bucket)

    plain, ddp = round_robin_hook([dist.group.WORLD]), DistributedDataParallel(small)
    count.__annotations__.clear()
    ddp.register_comm_hook(None, count)
    own = inputs.view(ranks, passes, batch, 16)[dist.get_rank()]
    for part in accumulate(ddp, own):
        (ddp(part).square().mean() / passes).backward()
    assert large.weight.grad is not None
    return {
        "equal": torch.equal(large.weight.grad, small.weight.grad),
        "exchanges": len(exchanges),
        "left_on": ddp.require_backward_grad_sync,
        "none": list(accumulate(ddp, [])),
    }


def fixed_sizes() -> dict[str, Any]:
    found = {}
    for name in ("plain", "unused"):
        plain, changed = Training(**OPTIONS[name]), Training(**OPTIONS[name])
        set_buckets(changed.ddp, cap_bytes=42_000, first_bytes=100)
        for _ in range(3):
            plain.step()
            changed.step(set_to_none=False)
        found[name] = [plain.losses == changed.losses, changed.buckets()]
    return found


def refusals() -> dict[str, Any]:
    training = Training()
    alone = dist.new_group([0]), dist.new_group([1])
    hooked = Training()
    hooked.ddp.register_comm_hook(dist.group.WORLD, allreduce_hook)
    lists = nn.Embedding(4, 4, sparse=True)
    tries = {
        "groups": lambda: round_robin_hook([dist.group.WORLD, alone[dist.get_rank()]]),
        "no group": lambda: round_robin_hook([]),
        "interface": lambda: link_groups(["lo", "none0"]),
        "one rank": lambda: tune_buckets(
            DistributedDataParallel(nn.Linear(2, 2), process_group=alone[dist.get_rank()])
        ),
        "hook": lambda: tune_buckets(hooked.ddp),
        "sparse": lambda: tune_buckets(DistributedDataParallel(lists)),
        "size": lambda: set_buckets(training.ddp, cap_bytes=0),
    }
    return {name: _message(act) for name, act in tries.items()}


def _message(act: Any) -> str | None:
    try:
        act()
    except UsageError as error:
        return str(error)
    return None


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    found = {name: globals()[name]() for name in sys.argv[4:]}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
