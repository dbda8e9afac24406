"""One rank of a real job: every algorithm against torch's own answer, for many sizes and dtypes.

python check_ranks.py RANK RANKS STORE_FILE COUNTS DTYPES

Prints the number of comparisons; the first difference ends the rank with an error.
"""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist

from stepscope.measure.collectives.calls import all_gather, all_reduce, reduce_scatter
from stepscope.records.collectives.algorithms import ALGORITHMS

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


def same_on_all_ranks(tensor: torch.Tensor, what: str) -> None:
    """To the bit."""
    bits = tensor.contiguous().view(torch.uint8)
    everyones = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, bits)
    assert all(torch.equal(bits, other) for other in everyones), f"{what}: ranks differ"


def expected_sum(dtype: torch.dtype, count: int) -> torch.Tensor:
    """torch's all_reduce; bool adds as torch's tensors do, which gloo does not say."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if dtype == torch.bool:
        parts = [values(count, dtype, seed) for seed in range(ranks)]
        return torch.stack(parts).any(0) if count else parts[0]
    whole = values(count, dtype, rank)
    if count:
        dist.all_reduce(whole)
    return whole


def check(algorithm: str, dtype: torch.dtype, count: int) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    what = f"{algorithm}, {ranks} ranks, {count} of {dtype}"
    summed = values(count, dtype, rank)
    all_reduce(summed, algorithm, timeout=PATIENCE)
    same(summed, expected_sum(dtype, count), f"all_reduce {what}")
    if count:
        same_on_all_ranks(summed, what)
    share = -(-count // ranks)  # torch wants equal shares
    whole = torch.empty(share * ranks, dtype=dtype)
    all_gather(whole, values(share, dtype, rank), algorithm, timeout=PATIENCE)
    parts = [values(share, dtype, seed) for seed in range(ranks)]
    assert torch.equal(whole, torch.cat(parts)), f"all_gather {what}"
    own = torch.empty(share, dtype=dtype)
    given = values(share * ranks, dtype, rank)
    reduce_scatter(own, given, algorithm, timeout=PATIENCE)
    wanted = expected_sum(dtype, share * ranks)[rank * share : (rank + 1) * share]
    same(own, wanted, f"reduce_scatter {what}")
    assert torch.equal(given, values(share * ranks, dtype, rank)), "the input was changed"
    return 3


def main() -> None:
    rank, ranks, store, counts, dtypes = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, int(ranks))
    dist.init_process_group("gloo", store=meeting, rank=int(rank), world_size=int(ranks))
    done = sum(
        check(algorithm, getattr(torch, dtype), int(count))
        for algorithm in ALGORITHMS
        for dtype in dtypes.split(",")
        for count in counts.split(",")
    )
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    main()
