"""Exchange gradients in turn over several process groups, or once for several backward passes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.errors import UsageError
from stepscope.fix.ddp.reducer import FITS_ANY_BUCKETS

if TYPE_CHECKING:
    Batch = TypeVar("Batch")

# Buckets of gradients in turn over several process groups, each on a network link of its own.

_INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo reads it whenever a group is made


def round_robin_hook(groups: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return a communication hook that sums bucket i in group i mod n.

        ddp.register_comm_hook(None, round_robin_hook(link_groups(["eth0", "eth1"])))

    Every group holds the ranks of the DDP in the same order. A bucket is summed as without the
    hook, so its gradients have the same bits.
    """
    import torch.distributed as dist

    _check(groups)
    ranks = dist.get_world_size(groups[0])

    def exchange(state: Any, bucket: Any) -> Any:
        del state
        # DDP multiplies as well; a division rounds differently.
        gradients = bucket.buffer().mul_(1.0 / ranks)
        group = groups[bucket.index() % len(groups)]
        work = dist.all_reduce(gradients, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    exchange.__annotations__.clear()  # DDP checks them, and does not know Any
    setattr(exchange, FITS_ANY_BUCKETS, True)
    return exchange


def link_groups(interfaces: Sequence[str]) -> list[Any]:
    """One gloo group of all ranks for each network interface of this host.

    All ranks call it, each with its own names of the same links in the same order.
    """
    import torch.distributed as dist

    present = {name for _, name in socket.if_nameindex()}
    missing = [name for name in interfaces if name not in present]
    if missing or not interfaces:
        what = f"no network interface {', '.join(missing)}" if missing else "no interface is named"
        raise UsageError(f"link_groups: {what}; this host has {', '.join(sorted(present))}")
    groups = []
    for name in interfaces:
        with _variable(_INTERFACE, name):
            groups.append(dist.new_group(backend="gloo"))
    return groups


def _check(groups: Sequence[Any]) -> None:
    """UsageError for groups that would not sum alike."""
    import torch.distributed as dist

    if not groups:
        raise UsageError("round_robin_hook: no process group is given. See link_groups")
    first, *others = [dist.get_process_group_ranks(group) for group in groups]
    for place, ranks in enumerate(others, start=1):
        if ranks != first:
            raise UsageError(
                f"round_robin_hook: group {place} holds the ranks {ranks}, but group 0 holds "
                f"{first}. Give groups of the same ranks in the same order"
            )


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a moment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# Several backward passes before one exchange of gradients.


def accumulate(ddp: Any, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Go through the batches of one step; gradients are exchanged in the last backward pass only.

        batches = [(inputs, targets), ...]
        for inputs, targets in accumulate(ddp, batches):
            (loss_of(ddp(inputs), targets) / len(batches)).backward()
        optimizer.step()

    The gradients are those of one large batch. They equal them to the last bit where no sum rounds.
    """
    exchanges = ddp.require_backward_grad_sync
    following = iter(batches)
    batch = next(following, _END)
    try:
        while batch is not _END:
            after = next(following, _END)
            ddp.require_backward_grad_sync = exchanges and after is _END
            yield batch
            batch = after
    finally:
        ddp.require_backward_grad_sync = exchanges


_END: Any = object()
