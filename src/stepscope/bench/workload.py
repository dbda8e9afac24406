"""A workload: a small, complete training of a known kind, in three sizes.

A file in workloads/ holds one: its record WORKLOAD, its model, its made-up data and its step, in
plain PyTorch. `python -m stepscope.bench.train NAME` trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

Size = Literal["tiny", "small", "paper"]
SIZES: tuple[Size, ...] = ("tiny", "small", "paper")
Step = Callable[[int], "torch.Tensor"]  # trains once, returns the loss; the device may still work


def descend(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, *, clip: float | None = None
) -> torch.Tensor:
    """Update the parameters by the loss's gradient, made no longer than `clip`; return the loss."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        from torch.nn.utils import clip_grad_norm_

        groups = optimizer.param_groups
        clip_grad_norm_([weight for group in groups for weight in group["params"]], clip)
    optimizer.step()
    return loss


class Config(Mapping[str, Any]):
    """The fixed hyper-parameters of a workload in one size: config.batch or config["batch"]."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"this size has no {name}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class TrainingPlace:
    """Where a workload trains."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    seed: int = 0

    def put(self, model: nn.Module) -> nn.Module:
        """On the device; with several ranks, wrapped in DistributedDataParallel."""
        model.to(self.device)
        if self.ranks == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)

    def generator(self) -> torch.Generator:
        """For the data: each rank draws its own."""
        import torch

        return torch.Generator(self.device).manual_seed(1_000 * self.seed + self.rank)


@dataclass(frozen=True, slots=True)
class Target:
    """Quality that a training of this size must reach: the mean loss of the last steps."""

    loss: float
    steps: int  # at most
    over: int = 5  # the steps whose mean counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkload:
    """What a workload says of itself."""

    name: str
    task: str  # "image classification"
    source: str  # whose model and shape: the paper
    samples: str  # what is counted: "images", "sentences"
    sizes: Mapping[Size, Mapping[str, Any]]  # each with at least `batch`: samples a step and rank
    targets: Mapping[Size, Target]
    build: Callable[[Config, TrainingPlace], Step]
    tags: frozenset[str] = field(default_factory=frozenset)  # "convolutional", "recurrent", ...

    def config(self, size: Size, changes: Mapping[str, Any] | None = None) -> Config:
        """The size's settings with `changes`; KeyError for a setting that it does not have."""
        values = dict(self.sizes[size])
        for name, value in (changes or {}).items():
            if name not in values:
                raise KeyError(name)
            values[name] = type(values[name])(value)
        return Config(values)
