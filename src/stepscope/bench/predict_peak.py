"""Predict the peak memory of workloads before they run: two steps with shapes alone, or for real
with small batches where shapes are not enough; and say how much memory is free.

    python -m stepscope.bench.predict_peak < requests (JSON, one PeakRequest a line)

A program of its own, because it may hold a GPU and must give it back.
"""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
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

from stepscope.bench.catalogue import load
from stepscope.bench.results import LIMIT_S, Method, PeakRequest, PredictedPeak
from stepscope.bench.workload import Config, TrainingPlace, TrainingWorkload
from stepscope.errors import UnreadableInputError
from stepscope.fix.memory_meters import meter_on
from stepscope.text.figures import long_duration
from stepscope.trace.files import read_start

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
    "aten::_efficient_attention", "aten::_embedding_bag", "aten::_flash_attention",
    "aten::_scaled_dot_product", "aten::_thnn_fused", "aten::baddbmm", "aten::bmm",
    "aten::convolution", "aten::cudnn_", "aten::embedding_dense_backward", "aten::index_put",
    "aten::native_batch_norm", "aten::native_group_norm", "aten::native_layer_norm_backward",
    "aten::scatter", "aten::sort", "aten::topk",
)  # fmt: skip
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
        call = f"{operator.name()} {tree_map(_describe_argument, (args, kwargs))}"
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


def _describe_argument(value: Any) -> Any:
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


# How much memory a training can still get on a device.

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
_MOST_BYTES = 1 << 20


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the GPU, or of this host and container; None where unknown."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # our own reserve would not be there for the training
        return int(torch.cuda.mem_get_info(device)[0])
    known = [_container_bytes()]
    with suppress(UnreadableInputError, KeyError):
        known.append(_fields(_MEMINFO, ":")["MemAvailable"] << 10)
    return min((size for size in known if size is not None), default=None)


def _container_bytes(folder: Path = _CONTAINER) -> int | None:
    """Count the files that it has in memory as free: they make room when it is needed."""
    try:
        limit, used = (
            int(read_start(folder / f"memory.{name}", _MOST_BYTES)) for name in ("max", "current")
        )
        files = _fields(folder / "memory.stat", " ").get("inactive_file", 0)
    except (UnreadableInputError, ValueError):  # no limit
        return None
    return max(0, limit - used + files)


def _fields(path: Path, between: str) -> dict[str, int]:
    """Read `name<between>number` lines; other lines are left out."""
    fields = {}
    for line in read_start(path, _MOST_BYTES).decode(errors="replace").splitlines():
        name, _, value = line.partition(between)
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[name] = int(number[0])
    return fields


# A workload that reads values from its tensors cannot be run with shapes alone: two steps are
# trained for real, with smaller batches if there is little room.

_FEWEST = 2  # samples: norms over a batch refuse one
_EASY = 0.5  # of free memory: what needs no more is tried
_TRIES = 6  # batches looked at to find one that fits


def main() -> None:
    """Answer each request, in their order."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=PeakRequest)
        with redirect_stdout(sys.stderr):  # what a workload prints is no answer
            answer = predict(request, device)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def predict(request: PeakRequest, device: torch.device) -> PredictedPeak:
    """Return no peak for a workload that cannot be run; the notes say why."""
    workload = load(request.name)
    config = workload.config(request.size, request.changes)  # type: ignore[arg-type]
    batch = int(config.batch)
    peaks = _Peaks(workload, config, device, request.ranks)
    known: dict[str, Any] = {
        "device": device.type,
        "free_bytes": free_bytes(device),
        "batch": batch,
        "ranks": request.ranks,
    }
    answer = PredictedPeak(**known)
    try:
        with _time_limit(LIMIT_S):
            answer = replace(peaks.at(batch), **known)
            if answer.fits is False:
                answer = replace(answer, fitting_batch=_largest_fitting(peaks, answer, batch))
    except (Exception, _TimeIsUp) as error:
        return replace(answer, notes=(*answer.notes, _describe(error)))
    return answer


class _TimeIsUp(BaseException):
    """Not an Exception: nobody who tries another way may catch it."""


@dataclass(slots=True)
class _Peaks:
    """Peaks of one workload at several batches."""

    workload: TrainingWorkload
    config: Config
    device: torch.device
    ranks: int
    _unfit_for_fakes: str | None = field(default=None)

    def at(self, batch: int) -> PredictedPeak:
        if self._unfit_for_fakes is None:
            try:
                memory = train_fake(self.workload, self._config(batch), self.device)
            except Exception as error:
                self._unfit_for_fakes = f"shapes are not enough: {_describe(error)}"
            else:
                peak = memory.peak_bytes + self._buckets(memory.gradient_bytes)
                return PredictedPeak(peak_bytes=peak, notes=memory.notes)
            finally:
                gc.collect()
        peak, method = self._trained(batch)
        return PredictedPeak(peak_bytes=peak, method=method, notes=(self._unfit_for_fakes,))

    def _trained(self, batch: int) -> tuple[int, Method]:
        """Twice the batch takes at most twice the memory, so half of it tells whether it can be
        tried."""
        half = max(_FEWEST, batch // 2)
        at_half = self._train(half)
        free = free_bytes(self.device)
        if half >= batch:
            return at_half, "trained"
        if free is not None and batch / half * at_half <= _EASY * free:
            return self._train(batch), "trained"
        quarter = max(1, half // 2)
        per_sample = (at_half - self._train(quarter)) / max(1, half - quarter)
        return at_half + round((batch - half) * per_sample), "smaller batches"

    def _train(self, batch: int) -> int:
        memory = train_for_real(self.workload, self._config(batch), self.device)
        gc.collect()
        return memory.peak_bytes + self._buckets(memory.gradient_bytes)

    def _buckets(self, gradient_bytes: int) -> int:
        """DistributedDataParallel keeps a copy of all gradients to exchange."""
        return gradient_bytes if self.ranks > 1 else 0

    def _config(self, batch: int) -> Config:
        return Config({**self.config, "batch": batch})


def _largest_fitting(peaks: _Peaks, too_large: PredictedPeak, batch: int) -> int | None:
    """Follow the straight line between batches until one fits; None if not even one sample does."""
    room = too_large.room_bytes or 0
    tried = [(batch, too_large.peak_bytes or 0)]
    while batch > 1 and len(tried) <= _TRIES:
        following = batch // 2
        if len(tried) > 1:
            (batch, peak), (other, other_peak) = tried[-1], tried[-2]
            per_sample = (other_peak - peak) / (other - batch)
            if per_sample > 0:
                following = batch + int((room - peak) / per_sample)
        batch = min(batch - 1, max(1, following))
        peak_bytes = peaks.at(batch).peak_bytes
        if replace(too_large, peak_bytes=peak_bytes).fits:
            return batch
        tried.append((batch, peak_bytes or 0))
    return None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise when they are over."""

    def give_up(*_: Any) -> None:
        raise _TimeIsUp(f"no prediction within {long_duration(seconds * 1e9)}")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _describe(error: BaseException) -> str:
    if isinstance(error, _TimeIsUp):
        return str(error)
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
