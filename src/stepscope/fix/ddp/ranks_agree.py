"""Numbers that all ranks of a group share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class RanksAgree:
    """Every rank calls the same methods in the same order, with as many numbers as the others."""

    def __init__(self, group: Any, device: Any) -> None:
        self._group, self._device = group, device

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Each number as it is on the rank where it is largest."""
        import torch.distributed as dist

        if not numbers:
            return []
        tensor = self._tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return self._numbers(tensor)

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """The numbers of the group's first rank."""
        import torch.distributed as dist

        tensor = self._tensor(numbers)
        dist.broadcast(tensor, dist.get_global_rank(self._group, 0), group=self._group)
        return self._numbers(tensor)

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.largest([0.0])

    def _tensor(self, numbers: Sequence[float]) -> Any:
        import torch

        return torch.tensor(list(numbers), dtype=torch.float64, device=self._device)

    def _numbers(self, tensor: Any) -> list[float]:
        numbers: list[float] = tensor.tolist()
        return numbers
