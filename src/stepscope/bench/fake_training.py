"""Two steps of a workload: what they hold, counted without allocating it, or for real.

Fake tensors have shapes and no memory. Operators whose needs a library chooses run for real, one
at a time.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils

from stepscope.bench.memory_ledger import MemoryLedger
from stepscope.bench.operator_needs import MeasuredNeeds, matmul_workspaces
from stepscope.bench.workload import Config, TrainingPlace
from stepscope.fix.memory_meters import meter_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.bench.workload import TrainingWorkload

STEPS = 2  # the first makes the optimizer's state, the second trains with it
# Bytes of the arguments of an operator that is run for real: a GPU says when they are too many, a
# host would be slow and might end other processes.
_MOST_TRIED = {"cpu": 256 << 20, "cuda": 1 << 62}
_MADE_BATCHES = 2  # of the data; more take the same memory each


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Of one rank."""

    peak_bytes: int
    start_bytes: int  # once model and data are there
    gradient_bytes: int  # of all trained parameters
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedPlace(TrainingPlace):
    """Keeps what is trained in sight."""

    models: list[nn.Module] = field(default_factory=list)

    def put(self, model: nn.Module) -> nn.Module:
        self.models.append(model)
        return model.to(self.device)

    @property
    def gradient_bytes(self) -> int:
        parameters = {id(one): one for model in self.models for one in model.parameters()}
        return sum(one.nbytes for one in parameters.values() if one.requires_grad)


@dataclass(frozen=True, slots=True)
class FakePlace(RecordedPlace):
    def put(self, model: nn.Module) -> nn.Module:
        """Raises for a model with recurrent layers on a GPU: its library keeps what only it knows,
        and reads addresses, which fakes do not have."""
        if self.device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in model.modules()):
            raise NotImplementedError("recurrent layers do not show what they save for backward")
        self.models.append(model)
        _move_fake(model, self.device)
        return model


def train_fake(workload: TrainingWorkload, config: Config, device: torch.device) -> TrainingMemory:
    """Raises what the workload raises: one that reads values from its tensors cannot be run."""
    batches = config.get("batches")
    if not isinstance(batches, int) or batches <= _MADE_BATCHES:
        return _train_fake(workload, config, device, STEPS)
    fewer = _train_fake(workload, _with(config, batches=_MADE_BATCHES - 1), device, 0)
    memory = _train_fake(workload, _with(config, batches=_MADE_BATCHES), device, STEPS)
    rest = (batches - _MADE_BATCHES) * (memory.start_bytes - fewer.start_bytes)
    return TrainingMemory(
        memory.peak_bytes + rest, memory.start_bytes + rest, memory.gradient_bytes, memory.notes
    )


def train_for_real(
    workload: TrainingWorkload, config: Config, device: torch.device
) -> TrainingMemory:
    """Two steps with real tensors."""
    kept, place = matmul_workspaces(device), RecordedPlace(device)

    def train() -> int:
        torch.manual_seed(place.seed)
        step = workload.build(config, place)
        for number in range(STEPS):
            step(number)
        return place.gradient_bytes

    gradient_bytes, peak = meter_on(device)(train)
    return TrainingMemory(peak + kept, 0, gradient_bytes)


def _train_fake(
    workload: TrainingWorkload, config: Config, device: torch.device, steps: int
) -> TrainingMemory:
    kept = matmul_workspaces(device)
    needs = MeasuredNeeds(meter_on(device), _MOST_TRIED[device.type])
    ledger, place = MemoryLedger(device.type, needs), FakePlace(device)
    with ExitStack() as stack:
        stack.enter_context(_many_tensors_at_once())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ledger)
        torch.manual_seed(place.seed)
        with ledger.values_read_as_zero():
            step = workload.build(config, place)
        start, gradients = ledger.held_bytes, place.gradient_bytes
        for number in range(steps):
            step(number)
    notes = tuple(sorted(needs.notes))
    return TrainingMemory(ledger.peak_bytes + kept, start, gradients, notes)


def _with(config: Config, **changes: Any) -> Config:
    return Config({**config, **changes})


def _move_fake(model: nn.Module, device: torch.device) -> None:
    """As Module.to, which cannot move fake parameters; shared ones stay shared."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and old.device != device:
                if id(old) not in moved:
                    moved[id(old)] = nn.Parameter(old.detach().to(device), old.requires_grad)
                setattr(module, name, moved[id(old)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@contextmanager
def _many_tensors_at_once() -> Iterator[None]:
    """Optimizers treat fake parameters like real ones: on GPUs they update all in one call, which
    needs more memory."""
    known = (_foreach_supported_types, _foreach_utils._foreach_supported_types)
    for types in known:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in known:
            types.remove(FakeTensor)
