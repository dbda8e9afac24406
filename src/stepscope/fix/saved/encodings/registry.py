"""All encodings of whole values by the first word of their name, and their trials on the
values of the recorded pass.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from stepscope.fix.saved.encodings.encoded import Encoded, dense, same_bits, whole
from stepscope.fix.saved.encodings.outcomes import encode_use
from stepscope.fix.saved.encodings.whole_values import (
    encode_bits,
    encode_four_bits,
    encode_narrow,
    encode_reduced,
    encode_sparse,
    encode_two_valued,
    encode_window,
    narrow_spec,
    sparse_spec,
)
from stepscope.fix.saved.operators import OperatorClock
from stepscope.fix.saved.step_record import LOSSY, HoldingOption, RecordedCall, SavedUse, is_lossy

_BY_WORD: dict[str, Callable[[torch.Tensor, str], Encoded | None]] = {
    "bits": lambda tensor, _: encode_bits(tensor),
    "two-valued": lambda tensor, _: encode_two_valued(tensor),
    "window": encode_window,
    "sparse": lambda tensor, _: encode_sparse(tensor),
    "narrow": encode_narrow,
    "4-bit": lambda tensor, _: encode_four_bits(tensor),
}


def encode_value(spec: str, tensor: torch.Tensor) -> Encoded | None:
    """Keep the whole value; None where this tensor does not allow it."""
    word, _, rest = spec.partition(" ")
    if word in _BY_WORD:
        return _BY_WORD[word](tensor, rest)
    return encode_reduced(tensor, word) if word in LOSSY else None


# Encodings are tried on the values of the recorded pass: real bytes, measured time, same bits.

_LEAST_BYTES = 1 << 10  # smaller values are not worth a search
# Their backward changes little when a value does. Others compare values (amax asks which element is
# the largest: none, once rounded) or divide by them (which may then be zero): never rounded.
_TOLERANT = re.compile(
    r"^(?:(?:Slow|Thnn|Mkldnn|Cudnn|Miopen)?Conv|Addmm|Mm|Bmm|Baddbmm|Linear|MkldnnLinear|Mv|Mul|Addcmul"
    r"|Relu|LeakyRelu|Gelu|Silu|Sigmoid|Tanh|Elu|Hardswish|Hardsigmoid|Hardtanh|Mish|Softplus|Softmax"
    r"|PreluKernel|Glu|Exp|Sin|Cos|\w*Norm)(?:olution|Depthwise)?(?:[23]D)?Backward\d*$"
)
_NORM = re.compile(r"(?:Batch|Layer|Group|Rms)Norm")
_MANY = 1 << 17  # elements


@dataclass(frozen=True, slots=True)
class _Trial:
    value: int
    spec: str
    kind: tuple[str, torch.dtype, int]  # word, type and the size's power of two
    numel: int
    held_bytes: int
    exact: torch.Tensor | None  # None: lossy
    clock: OperatorClock


class EncodingTrials:
    """Try encodings on one pass's values; `lossy` is the lossy one that is allowed, if any."""

    def __init__(self, device: torch.device, lossy: str | None) -> None:
        self._device = device
        self._lossy = lossy
        self._trials: list[_Trial] = []
        self._tried: set[tuple[int, str]] = set()
        self._unit_costs: dict[tuple[str, torch.dtype], tuple[float, float]] = {}

    def try_content(self, value: int, tensor: torch.Tensor) -> None:
        """Whatever the tensor's content and type allow."""
        if tensor.untyped_storage().nbytes() < _LEAST_BYTES:
            return
        with torch.no_grad():
            for spec in (sparse_spec(tensor.detach()), narrow_spec(tensor.detach()), self._lossy):
                if spec is not None:
                    self.try_value(value, spec, tensor)

    def try_value(self, value: int, spec: str, tensor: torch.Tensor) -> None:
        """Encode and decode; what does not come back is not offered."""
        tensor, word = tensor.detach(), spec.partition(" ")[0]
        flat = whole(tensor)
        if (value, spec) in self._tried or flat is None:
            return
        self._tried.add((value, spec))
        try:
            with torch.no_grad():
                encoded, decoded, clock = self._there_and_back(lambda: encode_value(spec, tensor))
        except torch.OutOfMemoryError:
            return
        if encoded is None or decoded is None:
            return
        exact = None if is_lossy(word) else same_bits(_flat(decoded), flat)
        kind = (word, tensor.dtype, flat.numel().bit_length())
        trial = _Trial(value, spec, kind, flat.numel(), encoded.size_bytes, exact, clock)
        self._trials.append(trial)

    def options(
        self, uses: Sequence[SavedUse], calls: Sequence[RecordedCall]
    ) -> dict[int, tuple[HoldingOption, ...]]:
        """Return options by value. A size's cost is the median of what was measured for it."""
        precise = precise_values(uses, calls)
        measured = defaultdict[tuple[str, torch.dtype, int], list[float]](list)
        for trial in self._trials:
            measured[trial.kind].append(sum(trial.clock.took_ns()) / trial.numel)
        found = defaultdict[int, list[HoldingOption]](list)
        for trial in self._trials:
            allowed = trial.value not in precise if trial.exact is None else bool(trial.exact)
            if allowed:
                cost_ns = round(median(measured[trial.kind]) * trial.numel)
                found[trial.value].append(
                    HoldingOption(encoding=trial.spec, held_bytes=trial.held_bytes, cost_ns=cost_ns)
                )
        return {value: tuple(options) for value, options in found.items()}

    def use_cost_ns(self, spec: str, dtype: torch.dtype, count: int) -> int:
        """Return what it takes to encode for one consumer: measured once a kind, for one element
        and for many."""
        if spec == "shape":
            return 0
        key = (spec.partition(" ")[0], dtype)
        if key not in self._unit_costs:
            few_ns, many_ns = (self._least_ns(spec, dtype, many) for many in (1, _MANY))
            self._unit_costs[key] = few_ns, max(0, many_ns - few_ns) / _MANY
        call_ns, element_ns = self._unit_costs[key]
        return round(call_ns + element_ns * count)

    def _least_ns(self, spec: str, dtype: torch.dtype, count: int) -> int:
        sample = torch.zeros(count, dtype=dtype, device=self._device)
        encode = functools.partial(encode_use, spec, sample)
        return min(sum(self._there_and_back(encode)[2].took_ns()) for _ in range(3))

    def _there_and_back(
        self, encode: Callable[[], Encoded | None]
    ) -> tuple[Encoded | None, torch.Tensor | None, OperatorClock]:
        """Encode and decode, each timed."""
        clock = OperatorClock(self._device)
        clock.start()
        encoded = encode()
        clock.stop()
        if encoded is None:
            return None, None, clock
        clock.start()
        decoded = encoded.decode()
        clock.stop()
        return encoded, decoded, clock


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
    """Return what the nodes of norms save, but for the largest, the input."""
    by_node: defaultdict[int, list[SavedUse]] = defaultdict(list)
    for use in uses:
        if use.order is not None and _NORM.search(use.consumer):
            by_node[use.order].append(use)
    found: set[int | None] = set()
    for saved in by_node.values():
        largest = max(saved, key=lambda use: math.prod(use.shape))
        found.update(use.value for use in saved if use is not largest)
    return found


def _flat(decoded: torch.Tensor) -> torch.Tensor:
    flat = dense(decoded)
    return decoded.flatten() if flat is None else flat
