"""Two steps of a workload: what they hold, counted without allocating it, or for real."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.bench.workload import Config, TrainingPlace, TrainingWorkload
from stepscope.fix.memory_meters import meter_on

if TYPE_CHECKING:
    Meter = Callable[[Callable[[], Any]], tuple[Any, int]]

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
        # As Module.to, which cannot move fake parameters; shared ones stay shared.
        moved: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, old in list(module._parameters.items()):
                if old is not None and old.device != self.device:
                    if id(old) not in moved:
                        moved[id(old)] = nn.Parameter(
                            old.detach().to(self.device), old.requires_grad
                        )
                    setattr(module, name, moved[id(old)])
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
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


# Which bytes a training holds at each moment, from the storages that its operators make.
#
# Real tensors and fake ones (shapes without memory) are counted alike.

_CUDA_BLOCK = 512  # bytes: the CUDA allocator hands out multiples


class MemoryLedger(TorchDispatchMode):
    """Counts the storages on one kind of device that are made while it is entered, until they are
    freed."""

    def __init__(self, kind: str, needs: MeasuredNeeds | None = None) -> None:
        super().__init__()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._kind = kind
        self._block = _CUDA_BLOCK if kind == "cuda" else 1
        self._needs = needs
        self._sizes: dict[int, int] = {}  # of living storages
        self._reads_zero = False

    @contextmanager
    def values_read_as_zero(self) -> Iterator[None]:
        """For code that reads a fake tensor's value, such as a check in an initialisation."""
        self._reads_zero = True
        try:
            yield
        finally:
            self._reads_zero = False

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Before the call: it may change its arguments' shapes.
        needs = self._needs.of(operator, args, kwargs) if self._needs else None
        try:
            results = operator(*args, **kwargs)
        except DataDependentOutputException:
            if not self._reads_zero or operator is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            if dtype == torch.bool:
                return False
            return 0.0 if dtype.is_floating_point else 0
        tensors = [value for value in tree_leaves(results) if isinstance(value, torch.Tensor)]
        sizes = [0] * len(tensors)
        if needs and self._needs and len(needs.results) == len(tensors):
            self._needs.returned(tensors, needs)
            sizes = [real.storage_bytes for real in needs.results]
        for tensor, least in zip(tensors, sizes, strict=True):
            if tensor.device.type == self._kind:
                self._count(tensor, least)
        beside = needs.beside_bytes if needs else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + beside)
        return results

    def _count(self, tensor: torch.Tensor, at_least: int) -> None:
        """A storage that was resized counts with its new size."""
        parts: tuple[torch.Tensor, ...] = (tensor,)
        if tensor.layout == torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
        for part in parts:
            storage = part.untyped_storage()
            size = max(storage.nbytes(), at_least)
            size = -(-size // self._block) * self._block
            key = storage._cdata
            before = self._sizes.get(key)
            if before is None:
                weakref.finalize(storage, self._free, key)
            self._sizes[key] = max(size, before or 0)
            self.held_bytes += self._sizes[key] - (before or 0)

    def _free(self, key: int) -> None:
        self.held_bytes -= self._sizes.pop(key)


# What operators really allocate, measured: each kind of call once, alone, on the device.
#
# Libraries choose the workspace of a convolution or the reserve of a norm, so shapes alone do not
# tell them. A call that cannot be measured is noted and counts by its shapes. Where a real result
# has another size or device than its fake (the seed of attention's dropout stays on the host),
# calls that get the fake are measured with the like of the real one.

# Beginnings of the names of operators that may allocate more than their results.
_MEASURED = (
    "aten::_efficient_attention",
    "aten::_embedding_bag",
    "aten::_flash_attention",
    "aten::_scaled_dot_product",
    "aten::_thnn_fused",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::cudnn_",
    "aten::embedding_dense_backward",
    "aten::index_put",
    "aten::native_batch_norm",
    "aten::native_group_norm",
    "aten::native_layer_norm_backward",
    "aten::scatter",
    "aten::sort",
    "aten::topk",
)
# Recurrent layers of libraries: what they keep for backward cannot be run on its own.
_UNKNOWABLE = ("aten::_cudnn_rnn", "aten::miopen_rnn", "aten::mkldnn_rnn")


@dataclass(frozen=True, slots=True)
class RealTensor:
    """What a result was like when the call ran for real."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class OperatorNeeds:
    results: tuple[RealTensor, ...]  # in order
    beside_bytes: int  # that it holds besides, at most, while it runs


@dataclass(slots=True)
class MeasuredNeeds:
    """Runs calls that were made with fake tensors once with real ones."""

    meter: Meter
    most_bytes: int  # of arguments: a larger call is not run
    notes: set[str] = field(default_factory=set)
    _known: dict[str, OperatorNeeds | None] = field(default_factory=dict)
    _unlike: dict[int, RealTensor] = field(default_factory=dict)  # by a fake's living storage

    def of(self, operator: Any, args: Any, kwargs: Any) -> OperatorNeeds | None:
        """None for an operator that allocates its results only; raises for one that has results
        of a size that only its library knows, and cannot be run on its own."""
        if operator.name().startswith(_UNKNOWABLE):
            raise NotImplementedError(f"{operator.name()} does not show what it saves for backward")
        name = operator.name()
        if not name.startswith(_MEASURED) and not _counts_flags(name, args):
            return None
        call = f"{operator.name()} {tree_map(_describe, (args, kwargs))}"
        if call not in self._known:
            self._known[call] = self._measure(operator, args, kwargs)
        return self._known[call]

    def returned(self, fakes: Sequence[torch.Tensor], needs: OperatorNeeds) -> None:
        """A measured call was made with fakes, and these are its results: remember which of them
        are unlike the real ones."""
        for fake, real in zip(fakes, needs.results, strict=True):
            if fake.shape != real.shape or fake.device.type != real.device.type:
                storage = fake.untyped_storage()
                self._unlike[storage._cdata] = real
                weakref.finalize(storage, self._unlike.pop, storage._cdata, None)

    def _measure(self, operator: Any, args: Any, kwargs: Any) -> OperatorNeeds | None:
        if sum(map(_bytes, _tensors((args, kwargs)))) > self.most_bytes:
            self.notes.add(f"workspace of {operator.name()} is unknown: too large to try")
            return None
        try:
            with unset_fake_temporarily(), torch.no_grad():
                given = tree_map(self._zeros_like, (args, kwargs))
                results, highest = self.meter(lambda: operator(*given[0], **given[1]))
                old = {_address(tensor) for tensor in _tensors(given)}
                fresh = {_address(tensor): tensor for tensor in _tensors(results)}
                kept = sum(_bytes(tensor) for at, tensor in fresh.items() if at not in old)
                return OperatorNeeds(
                    tuple(map(_real_tensor, _tensors(results))), max(0, highest - kept)
                )
        except Exception as error:
            self.notes.add(f"workspace of {operator.name()} is unknown: {type(error).__name__}")
            return None

    def _zeros_like(self, value: Any) -> Any:
        """Zeros, so that indices are valid."""
        if not isinstance(value, torch.Tensor):
            return value
        real = self._unlike.get(value.untyped_storage()._cdata) or _real_tensor(value)
        made = torch.empty_strided(real.shape, real.stride, dtype=value.dtype, device=real.device)
        return made.zero_()


@cache
def matmul_workspaces(device: torch.device) -> int:
    """Bytes that the matrix library keeps once it was used forward and backward; none on a CPU.

    Ask before anything else runs on the device: the first use allocates them."""
    if device.type != "cuda":
        return 0
    before = int(torch.cuda.memory_allocated(device))
    layer = torch.nn.Linear(8, 8, device=device)
    layer(torch.ones(8, 8, device=device, requires_grad=True)).sum().backward()
    torch.cuda.synchronize(device)
    del layer
    return int(torch.cuda.memory_allocated(device)) - before


def _counts_flags(name: str, args: Any) -> bool:
    """A sum over a mask copies the mask to int64 first."""
    given = args[0] if args else None
    is_mask = isinstance(given, torch.Tensor) and given.dtype == torch.bool
    return is_mask and name.startswith("aten::sum")


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.dtype, value.device.type)


def _real_tensor(value: torch.Tensor) -> RealTensor:
    return RealTensor(tuple(value.shape), value.stride(), value.device, _bytes(value))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
