"""A real job: every algorithm against torch's own answer, for many sizes and dtypes.

python check_ranks.py STORE_FILE GROUP_SIZES COUNTS DTYPES

As many ranks start as the largest group has; smaller groups are the first 2, 3, ... of them. They
are forked, because importing torch takes longer than all comparisons. Rank 0 prints how many it
made; the first difference ends the job with an error.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys
from typing import Any

import torch
import torch.distributed as dist

from stepscope.measure.calibrate.collective_algorithms import all_gather, all_reduce, reduce_scatter
from stepscope.records.collective_schedules import ALGORITHMS

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 6e-3, torch.bfloat16: 5e-2}
PATIENCE = datetime.timedelta(seconds=60)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.rand(count, generator=generator, dtype=torch.float64).to(dtype)
    high = 2 if dtype == torch.bool else 100
    return torch.randint(0, high, (count,), generator=generator).to(dtype)


def same(ours: torch.Tensor, torchs: torch.Tensor, what: str) -> None:
    if ours.dtype in ROUNDING:
        near = ROUNDING[ours.dtype]
        assert torch.allclose(ours.double(), torchs.double(), rtol=near, atol=near), what
    else:
        assert torch.equal(ours, torchs), what


def expected_sum(dtype: torch.dtype, count: int, group: Any) -> torch.Tensor:
    """torch's all_reduce; bool adds as torch's tensors do, which gloo does not say."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if dtype == torch.bool:
        parts = [values(count, dtype, seed) for seed in range(ranks)]
        return torch.stack(parts).any(0) if count else parts[0]
    whole = values(count, dtype, rank)
    if count:
        dist.all_reduce(whole, group=group)
    return whole


def check(algorithm: str, dtype: torch.dtype, count: int, group: Any) -> int:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    what = f"{algorithm}, {ranks} ranks, {count} of {dtype}"
    summed = values(count, dtype, rank)
    all_reduce(summed, algorithm, group=group, timeout=PATIENCE)
    same(summed, expected_sum(dtype, count, group), f"all_reduce {what}")
    if count:
        # To the bit.
        bits = summed.contiguous().view(torch.uint8)
        everyones = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, bits, group=group)
        assert all(torch.equal(bits, other) for other in everyones), f"{what}: ranks differ"
    share = -(-count // ranks)  # torch wants equal shares
    whole = torch.empty(share * ranks, dtype=dtype)
    all_gather(whole, values(share, dtype, rank), algorithm, group=group, timeout=PATIENCE)
    parts = [values(share, dtype, seed) for seed in range(ranks)]
    assert torch.equal(whole, torch.cat(parts)), f"all_gather {what}"
    own = torch.empty(share, dtype=dtype)
    given = values(share * ranks, dtype, rank)
    reduce_scatter(own, given, algorithm, group=group, timeout=PATIENCE)
    wanted = expected_sum(dtype, share * ranks, group)[rank * share : (rank + 1) * share]
    same(own, wanted, f"reduce_scatter {what}")
    assert torch.equal(given, values(share * ranks, dtype, rank)), "the input was changed"
    return 3


def run_rank(rank: int, store: str, sizes: str, counts: str, dtypes: str) -> None:
    group_sizes = [int(size) for size in sizes.split(",")]
    torch.set_num_threads(1)
    world = max(group_sizes)
    meeting = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    groups = [dist.new_group(list(range(size))) for size in group_sizes]
    done = sum(
        check(algorithm, getattr(torch, dtype), int(count), group)
        for size, group in zip(group_sizes, groups, strict=True)
        if rank < size
        for algorithm in ALGORITHMS
        for dtype in dtypes.split(",")
        for count in counts.split(",")
    )
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(f"{done}\n")


def main() -> int:
    forked = multiprocessing.get_context("fork")
    ranks = max(int(size) for size in sys.argv[2].split(","))
    started = [forked.Process(target=run_rank, args=(rank, *sys.argv[1:])) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return max(abs(process.exitcode or 0) for process in started)


if __name__ == "__main__":
    sys.exit(main())
