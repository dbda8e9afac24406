"""Lesson 6: how long an all-reduce of two sizes takes, and the line through both."""

import time
from statistics import median

import torch
import torch.distributed as dist

SMALL, LARGE = 4 * 1024, 8 * 1024 * 1024  # bytes


def seconds(size_bytes: int, repeats: int = 15) -> float:
    """The median time of a sum over all ranks, each started together."""
    numbers = torch.ones(size_bytes // 4)
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    small, large = seconds(SMALL), seconds(LARGE)
    if dist.get_rank() == 0:
        beta = (large - small) / (LARGE - SMALL)
        alpha = small - beta * SMALL
        print(f"{SMALL} bytes take {small * 1e6:.0f} us, {LARGE} bytes {large * 1e6:.0f} us")
        print(f"alpha {alpha * 1e6:.0f} us, beta {beta * 1e9:.3f} ns a byte", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
