"""Several backward passes before one exchange of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Batch = TypeVar("Batch")


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
