"""all_reduce, all_gather and reduce_scatter by algorithm, as torch.distributed has them.

all_reduce(tensor, "ring")
all_gather(output, share, "bruck")
reduce_scatter(share, tensor, "halving_doubling")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.errors import UsageError
from stepscope.measure.collectives.runner import ScheduleRunner
from stepscope.records.collectives.algorithms import build_schedule

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence


def all_reduce(
    tensor: torch.Tensor,
    algorithm: str,
    *,
    group: Any = None,
    hosts: Sequence[Sequence[int]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Sum a tensor of any shape over all ranks, in place. `hosts` lists each host's ranks."""
    flat = tensor.detach().reshape(-1)  # a copy where it is not contiguous
    _run("all_reduce", flat, algorithm, group, hosts, timeout)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def all_gather(
    output: torch.Tensor,
    share: torch.Tensor,
    algorithm: str,
    *,
    group: Any = None,
    hosts: Sequence[Sequence[int]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Every rank's share, one after the other, in `output` on all ranks."""
    flat = _flat_whole(output, share, group)
    rank, count = dist.get_rank(group), share.numel()
    flat[rank * count : (rank + 1) * count].copy_(share.detach().reshape(-1))
    _run("all_gather", flat, algorithm, group, hosts, timeout)


def reduce_scatter(
    share: torch.Tensor,
    tensor: torch.Tensor,
    algorithm: str,
    *,
    group: Any = None,
    hosts: Sequence[Sequence[int]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """This rank's share of the sum over all ranks; `tensor` stays as it is."""
    flat = _flat_whole(tensor, share, group).clone()
    _run("reduce_scatter", flat, algorithm, group, hosts, timeout)
    rank, count = dist.get_rank(group), share.numel()
    share.detach().view(-1).copy_(flat[rank * count : (rank + 1) * count])


def _run(
    kind: str,
    flat: torch.Tensor,
    algorithm: str,
    group: Any,
    hosts: Sequence[Sequence[int]] | None,
    timeout: datetime.timedelta | None,
) -> None:
    schedule = build_schedule(algorithm, kind, dist.get_world_size(group), hosts)
    ScheduleRunner(schedule, flat, group=group, timeout=timeout).run(flat)


def _flat_whole(whole: torch.Tensor, share: torch.Tensor, group: Any) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    if whole.numel() != ranks * share.numel() or whole.dtype != share.dtype:
        raise UsageError(
            f"the whole has {whole.numel()} elements of {whole.dtype}; {ranks} ranks with shares "
            f"of {share.numel()} of {share.dtype} need {ranks * share.numel()} of that dtype"
        )
    if not whole.is_contiguous() or not share.is_contiguous():
        raise UsageError("all_gather and reduce_scatter need contiguous tensors")
    return whole.detach().view(-1)
