"""Exchange gradients in other buckets, in turn over several process groups, or once for
several backward passes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.errors import UsageError
from stepscope.text.figures import binary_size

if TYPE_CHECKING:
    Batch = TypeVar("Batch")
    Hook = Callable[[Any, Any], Any]

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
    groups, before = [], os.environ.get(_INTERFACE)
    try:
        for name in interfaces:
            os.environ[_INTERFACE] = name
            groups.append(dist.new_group(backend="gloo"))
    finally:
        os.environ.pop(_INTERFACE)
        if before is not None:
            os.environ[_INTERFACE] = before
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


# Give a DistributedDataParallel other buckets between two steps.
#
# DDP has no call for it, but it can build its reducer anew: that is what it does after unpickling.
# Here it does so with other sizes, and in the order in which gradients become ready.
#
# A reducer changes its buckets once more after its first backward pass. One that is only tried gets
# its parameters in the measured order and is told that a pass has shown it: its buckets are final
# at once. One that stays is left as DDP would build it.

# A hook with this attribute keeps nothing from one bucket to another, or from step to step.
FITS_ANY_BUCKETS = "fits_any_buckets"
# Where torch.distributed.Reducer takes what is changed here.
_INDICES, _LIMITS, _CAP, _FIRST = 1, 2, 5, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizes:
    """A bucket is closed once it holds so many bytes; the first one has a limit of its own."""

    first_bytes: int
    cap_bytes: int

    def __str__(self) -> str:
        if self.first_bytes == self.cap_bytes:
            return binary_size(self.cap_bytes)
        return f"{binary_size(self.first_bytes)}, then {binary_size(self.cap_bytes)}"


def why_not_rebuilt(ddp: Any) -> str | None:
    """Why this DDP must keep its reducer, or None."""
    if not hasattr(ddp.reducer, "_push_all_rebuilt_params"):
        return "this version of torch does not let DDP rebuild its buckets"
    reasons = {
        "DDP runs with mixed_precision": ddp.mixed_precision is not None,
        "torch.compile reduces its gradients (python_reducer)": ddp._use_python_reducer,
        "every bucket has its own size (bucket_cap_mb_list)": bool(
            getattr(ddp, "bucket_bytes_cap_list", None)
        ),
        "some all-reduces are delayed (delay_all_reduce_named_params)": bool(
            ddp._delay_all_reduce_params
        ),
        "ranks may end early (join)": ddp._join_config.enable,
        "an optimizer steps during backward": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()
        ),
        "the model has sparse gradients": any(ddp._build_params_for_reducer()[1]),
        "torch's built-in communication hook is registered": (
            bool(ddp._get_ddp_logging_data().get("comm_hook")) and not ddp._comm_hooks
        ),
        "a communication hook is registered that may depend on the buckets": any(
            not getattr(hook, FITS_ANY_BUCKETS, False) for hook, _state in ddp._comm_hooks
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def reducer_parameters(ddp: Any) -> list[Any]:
    """The parameters whose gradients are exchanged, in the order of the module."""
    parameters: list[Any] = ddp._build_params_for_reducer()[0]
    return parameters


def own_hook(ddp: Any) -> tuple[Any, Hook] | None:
    """The state and the hook that the script has registered."""
    return next(((state, hook) for hook, state in ddp._comm_hooks), None)


def rebuild_reducer(
    ddp: Any,
    order: Sequence[int] | None,
    sizes: BucketSizes | None,
    hook: tuple[Any, Hook] | None = None,
    *,
    stays: bool = True,
) -> BucketSizes:
    """Exchange gradients in buckets of these sizes, and return the sizes that DDP was built with.

    `order` holds places in reducer_parameters; None keeps the order that DDP begins with. Sizes of
    None are those that DDP was built with. `hook` is a communication hook and its state. Buckets of
    a reducer that does not stay need an order. No forward may wait for its backward: those
    gradients would not be exchanged.
    """
    import torch.distributed as dist

    ddp.reducer._check_reducer_finalized()  # DDP's next forward would raise the same error
    ddp.reducer._remove_autograd_hooks()
    parameters = reducer_parameters(ddp)
    if order is not None and not stays:
        parameters = [parameters[place] for place in order]
        order = range(len(order))
    names = ddp._build_debug_param_to_name_mapping(parameters)
    with _other_buckets(sizes, order) as built_with:
        ddp._ddp_init_helper(parameters, [False] * len(parameters), names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    if hook is not None:
        state, call = hook
        ddp.logger._set_comm_hook_name(getattr(call, "__qualname__", type(call).__name__))
        dist._register_comm_hook(ddp.reducer, state, call)
    if not stays:
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()
    return built_with[0]


def set_buckets(ddp: Any, *, cap_bytes: int, first_bytes: int | None = None) -> None:
    """Give a DDP these bucket sizes, before its first step or between two steps.

    All ranks call it. Unlike `bucket_cap_mb`, the first bucket may have a size of its own.
    """
    sizes = BucketSizes(
        first_bytes=cap_bytes if first_bytes is None else first_bytes, cap_bytes=cap_bytes
    )
    if min(sizes.first_bytes, sizes.cap_bytes) < 1:
        raise UsageError(f"set_buckets: a bucket must hold at least one byte, not {sizes}")
    why_not = why_not_rebuilt(ddp)
    if why_not is not None:
        raise UsageError(f"set_buckets: the buckets cannot be changed: {why_not}")
    # DDP finds the best order itself after a pass, unless it looks for unused parameters.
    keeps_order = ddp.find_unused_parameters and not ddp.static_graph
    order = list(reversed(range(len(reducer_parameters(ddp))))) if keeps_order else None
    rebuild_reducer(ddp, order, sizes, own_hook(ddp))


def bucket_indices(parameters: Sequence[Any], sizes: BucketSizes) -> list[list[int]]:
    """Which parameters share a bucket, by torch's own rule."""
    return _assign(parameters, sizes)[0]


def _assign(parameters: Sequence[Any], sizes: BucketSizes) -> tuple[list[list[int]], list[int]]:
    """The parameters of each bucket, and the limit at which it was closed."""
    import torch.distributed as dist

    limits = [sizes.first_bytes, sizes.cap_bytes]
    indices, closed_at = dist._compute_bucket_assignment_by_size(
        list(parameters), limits, [False] * len(parameters)
    )
    return indices, closed_at


@contextmanager
def _other_buckets(
    sizes: BucketSizes | None, order: Sequence[int] | None
) -> Iterator[list[BucketSizes]]:
    """Let DDP build its reducer with these buckets; yields the sizes that it wanted."""
    import torch.distributed as dist

    original: Any = dist.Reducer
    wanted: list[BucketSizes] = []

    def build(*given: Any) -> Any:
        arguments = list(given)
        wanted.append(BucketSizes(first_bytes=given[_FIRST], cap_bytes=given[_CAP]))
        chosen = sizes or wanted[0]
        arguments[_FIRST], arguments[_CAP] = chosen.first_bytes, chosen.cap_bytes
        if order is not None:
            indices, arguments[_LIMITS] = _assign([given[0][place] for place in order], chosen)
            arguments[_INDICES] = [[order[place] for place in bucket] for bucket in indices]
        return original(*arguments)

    dist.Reducer = build
    try:
        yield wanted
    finally:
        dist.Reducer = original
