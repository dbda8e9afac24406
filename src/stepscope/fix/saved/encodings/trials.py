"""Encodings are tried on the values of the recorded pass: real bytes, measured time, same bits."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stepscope.fix.saved.encoding_names import is_lossy
from stepscope.fix.saved.encodings.encoded import dense, same_bits, whole
from stepscope.fix.saved.encodings.outcomes import encode_use
from stepscope.fix.saved.encodings.registry import encode_value, exact_specs
from stepscope.fix.saved.operator_clock import OperatorClock
from stepscope.fix.saved.step_record import HoldingOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.saved.encodings.encoded import Encoded
    from stepscope.fix.saved.step_record import RecordedCall, SavedUse

_LEAST_BYTES = 1 << 10  # smaller values are not worth a search
# Their backward changes little when a value does. Others compare values (amax asks which element is
# the largest: none, once rounded) or divide by them (which may then be zero): never rounded.
_TOLERANT = re.compile(
    r"^(?:(?:Slow|Thnn|Mkldnn|Cudnn|Miopen)?Conv|Addmm|Mm|Bmm|Baddbmm|Linear|MkldnnLinear|Mv|Mul|Addcmul"
    r"|Relu|LeakyRelu|Gelu|Silu|Sigmoid|Tanh|Elu|Hardswish|Hardsigmoid|Hardtanh|Mish|Softplus|Softmax"
    r"|PreluKernel|Glu|Exp|Sin|Cos|\w*Norm)(?:olution|Depthwise)?(?:[23]D)?Backward\d*$"
)
_NORM = re.compile(r"(?:Batch|Layer|Group|Rms)Norm")
_OUTCOME_ELEMENTS = 1 << 20  # one size stands for all: the cost is the same per element


@dataclass(frozen=True, slots=True)
class _Trial:
    value: int
    spec: str
    kind: tuple[str, torch.dtype, int]  # word, type and the size's power of two
    numel: int
    held_bytes: int
    exact: torch.Tensor | None  # None: lossy


class EncodingTrials:
    """Of one pass on one device; `lossy` is the lossy encoding that is allowed, if any."""

    def __init__(self, device: torch.device, lossy: str | None) -> None:
        self._clock = OperatorClock(device)
        self._lossy = lossy
        self._trials: list[_Trial] = []
        self._tried: set[tuple[int, str]] = set()
        self._warm: set[tuple[str, torch.dtype]] = set()

    def try_content(self, value: int, tensor: torch.Tensor) -> None:
        """Whatever the tensor's content and type allow."""
        if tensor.untyped_storage().nbytes() < _LEAST_BYTES:
            return
        with torch.no_grad():
            specs = exact_specs(tensor.detach())
        if self._lossy is not None:
            specs.append(self._lossy)
        for spec in specs:
            self.try_value(value, spec, tensor)

    def try_value(self, value: int, spec: str, tensor: torch.Tensor) -> None:
        """Encode and decode; what does not come back is not offered."""
        if (value, spec) in self._tried:
            return
        self._tried.add((value, spec))
        tensor = tensor.detach()
        flat, word = whole(tensor), spec.partition(" ")[0]
        if flat is None:
            return
        try:
            with torch.no_grad():
                if (word, tensor.dtype) not in self._warm:
                    self._warm.add((word, tensor.dtype))
                    _there_and_back(spec, tensor)
                self._clock.start()
                encoded, decoded = _there_and_back(spec, tensor)
                self._clock.stop()
        except torch.OutOfMemoryError:
            return
        if encoded is None or decoded is None:
            self._trials.append(_failed(value, spec, tensor))
            return
        exact = None if is_lossy(word) else same_bits(_flat(decoded), flat)
        kind = (word, tensor.dtype, flat.numel().bit_length())
        trial = _Trial(value, spec, kind, flat.numel(), encoded.size_bytes, exact)
        self._trials.append(trial)

    def options(
        self, uses: Sequence[SavedUse], calls: Sequence[RecordedCall]
    ) -> dict[int, tuple[HoldingOption, ...]]:
        """By value. The cost of one size is the least that was measured for it."""
        precise = precise_values(uses, calls)
        costs: dict[tuple[str, torch.dtype, int], float] = {}
        for trial, took_ns in zip(self._trials, self._clock.took_ns(), strict=True):
            cost = took_ns / trial.numel
            costs[trial.kind] = min(cost, costs.get(trial.kind, cost))
        found = defaultdict[int, list[HoldingOption]](list)
        for trial in self._trials:
            allowed = trial.value not in precise if trial.exact is None else bool(trial.exact)
            if allowed:
                cost_ns = round(costs[trial.kind] * trial.numel)
                found[trial.value].append(
                    HoldingOption(encoding=trial.spec, held_bytes=trial.held_bytes, cost_ns=cost_ns)
                )
        return {value: tuple(options) for value, options in found.items()}


def precise_values(uses: Sequence[SavedUse], calls: Sequence[RecordedCall]) -> set[int | None]:
    """Those that may not be rounded: somebody depends on their exact content, or on that of a value
    that can be recomputed from them."""
    precise = {use.value for use in uses if not _is_tolerant(use.consumer)}
    for call in reversed(calls):
        if call.refusal is None and not precise.isdisjoint(call.outputs):
            precise.update(call.inputs)
    return precise | _statistics(uses)


def _is_tolerant(consumer: str) -> bool:
    is_norm = "Norm" in consumer
    return bool(_TOLERANT.match(consumer)) and (not is_norm or bool(_NORM.search(consumer)))


def _statistics(uses: Sequence[SavedUse]) -> set[int | None]:
    """Of norms: all that a node saves but the largest, its input."""
    by_node: defaultdict[int, list[SavedUse]] = defaultdict(list)
    for use in uses:
        if use.order is not None and _NORM.search(use.consumer):
            by_node[use.order].append(use)
    found: set[int | None] = set()
    for saved in by_node.values():
        largest = max(saved, key=lambda use: math.prod(use.shape))
        found.update(use.value for use in saved if use is not largest)
    return found


def _there_and_back(spec: str, tensor: torch.Tensor) -> tuple[Encoded | None, torch.Tensor | None]:
    encoded = encode_value(spec, tensor)
    return encoded, None if encoded is None else encoded.decode()


def _failed(value: int, spec: str, tensor: torch.Tensor) -> _Trial:
    """Timed, but not offered."""
    never = torch.zeros((), dtype=torch.bool)
    return _Trial(value, spec, ("", tensor.dtype, 0), max(1, tensor.numel()), 0, never)


def _flat(decoded: torch.Tensor) -> torch.Tensor:
    flat = dense(decoded)
    return decoded.flatten() if flat is None else flat


class OutcomeCosts:
    """What it takes to encode for one consumer, per element; measured once a kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[str, torch.dtype], float] = {}

    def cost_ns(self, spec: str, dtype: torch.dtype, count: int) -> int:
        if spec == "shape":
            return 0
        key = (spec.partition(" ")[0], dtype)
        if key not in self._known:
            self._known[key] = self._measured(spec, dtype)
        return round(self._known[key] * count)

    def _measured(self, spec: str, dtype: torch.dtype) -> float:
        sample = torch.zeros(_OUTCOME_ELEMENTS, dtype=dtype, device=self._device)
        clock = OperatorClock(self._device)
        for _ in range(3):
            clock.start()
            encoded = encode_use(spec, sample)
            if encoded is not None:
                encoded.decode()
            clock.stop()
        return min(clock.took_ns()) / _OUTCOME_ELEMENTS
