"""What one backward node reads of a tensor, where that is less than its values."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.fix.saved.encodings.encoded import Encoded, dense
from stepscope.fix.saved.encodings.whole_values import pack_codes, packed_bytes, unpack_codes
from stepscope.fix.saved.operators import is_capturing

_SHAPE_ONLY = re.compile(r"(?:Adaptive)?(?:Max|Avg)Pool[23]D(?:WithIndices)?Backward0$")


@dataclass(frozen=True, slots=True)
class OutcomeRule:
    """How elements are told apart: `codes(tensor, limits)` as uint8, or as booleans."""

    width: int  # bits
    codes: Callable[[torch.Tensor, tuple[float, ...]], torch.Tensor]


def _within(x: torch.Tensor, limits: tuple[float, ...]) -> torch.Tensor:
    """0 outside or on a limit, 1 inside, 2 NaN."""
    return ((x > limits[0]) & (x < limits[1])).to(torch.uint8) + 2 * x.isnan().to(torch.uint8)


_OUTCOMES = {
    "sign": OutcomeRule(1, lambda x, _: ~(x <= 0)),
    "passes": OutcomeRule(1, lambda x, limits: ~(x <= limits[0])),
    "above": OutcomeRule(1, lambda x, limits: x > limits[0]),
    "inside": OutcomeRule(1, lambda x, limits: (x > limits[0]) & (x < limits[1])),
    "least": OutcomeRule(1, lambda x, limits: x >= limits[0]),
    "most": OutcomeRule(1, lambda x, limits: x <= limits[0]),
    "between": OutcomeRule(1, lambda x, limits: (x >= limits[0]) & (x <= limits[1])),
    "within": OutcomeRule(2, _within),
}


def is_outcome(spec: str) -> bool:
    """Whether an encoding is only enough for one kind of consumer."""
    return spec.partition(" ")[0] in _OUTCOMES or spec == "shape"


def outcome_for(node: Any, dtype: torch.dtype) -> str | None:
    """The encoding that is enough for what a node saved as `self` or `result`."""
    name = str(node.name())
    if not dtype.is_floating_point:
        return None
    if _SHAPE_ONLY.match(name):
        return "shape"
    find = _NODES.get(name)
    spec = None if find is None else find(node)
    return spec if spec is not None and _has_all_sides(spec, dtype) else None


_NODES: dict[str, Callable[[Any], str | None]] = {
    "ReluBackward0": lambda _: "sign",
    "ThresholdBackward0": lambda node: _spec("passes", node._saved_threshold),
    "LeakyReluBackward0": lambda _: "above 0.0",
    "LeakyReluBackward1": lambda _: "above 0.0",
    "HardtanhBackward0": lambda node: _spec("within", node._saved_min_val, node._saved_max_val),
    "HardsigmoidBackward0": lambda _: "inside -3.0 3.0",
    "ClampMinBackward0": lambda node: _spec("least", node._saved_min),
    "ClampMaxBackward0": lambda node: _spec("most", node._saved_max),
    "ClampBackward1": lambda node: _clamp(node._saved_min, node._saved_max),
}


def _clamp(low: Any, high: Any) -> str | None:
    if low is None:
        return _spec("most", high)
    return _spec("least", low) if high is None else _spec("between", low, high)


def _spec(word: str, *limits: Any) -> str | None:
    if not all(isinstance(limit, (int, float)) for limit in limits):
        return None
    return " ".join([word, *(repr(float(limit)) for limit in limits)])


def _has_all_sides(spec: str, dtype: torch.dtype) -> bool:
    """In short types a kernel may compare with the limit itself or with the nearest number: only
    limits that are exact there are taken."""
    _, limits = _read(spec)
    if dtype.itemsize < 4 and any(
        float(torch.tensor(limit, dtype=torch.float64).to(dtype)) != limit for limit in limits
    ):
        return False
    return _representatives(spec, dtype) is not None


def _read(spec: str) -> tuple[OutcomeRule, tuple[float, ...]]:
    word, *limits = spec.split(" ")
    return _OUTCOMES[word], tuple(float(limit) for limit in limits)


@functools.cache
def _representatives(spec: str, dtype: torch.dtype) -> tuple[float, ...] | None:
    """An element for each code, found by trying; None if no element but NaN gets code 0 or 1."""
    outcome, limits = _read(spec)
    largest = torch.finfo(dtype).max
    tries = [0.0, 1.0, -1.0, largest, -largest, math.inf, -math.inf]
    for limit in limits:
        tries += [limit, limit - 1, limit + 1, limit / 2, limit * 2, sum(limits) / len(limits)]
    values = torch.tensor(tries, dtype=torch.float64).to(dtype)
    codes = outcome.codes(values, limits).to(torch.uint8).tolist()
    by_code = dict(zip(reversed(codes), reversed(values.tolist()), strict=True))
    if 0 not in by_code or 1 not in by_code:
        return None
    return tuple(by_code.get(code, math.nan) for code in range(2**outcome.width))


_TABLES: dict[tuple[tuple[float, ...], torch.dtype, torch.device], torch.Tensor] = {}


def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The element for each code, made on the device: a copy from the host would wait for it. What
    is made in the capture of a CUDA graph belongs to the graph."""
    key = (values, dtype, device)
    table = _TABLES.get(key)
    if table is None:
        table = torch.stack([torch.full((), v, dtype=dtype, device=device) for v in values])
        if not is_capturing():
            _TABLES[key] = table
    return table


def outcome_bytes(spec: str, count: int) -> int:
    return 0 if spec == "shape" else packed_bytes(count, _read(spec)[0].width)


def encode_use(spec: str, tensor: torch.Tensor) -> Encoded | None:
    """Keep what one kind of node reads; the result lies in memory as `tensor` does."""
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if spec == "shape":
        return Encoded(0, lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device))
    flat, values = dense(tensor), _representatives(spec, dtype)
    if flat is None or values is None:
        return None
    count, (outcome, limits) = flat.numel(), _read(spec)
    codes = outcome.codes(flat, limits).view(torch.uint8)
    packed = pack_codes(codes, outcome.width)
    table = _table(values, dtype, device)

    def decode() -> torch.Tensor:
        decoded = table[unpack_codes(packed, count, outcome.width).int()]
        return decoded.as_strided(shape, stride)

    return Encoded(packed.nbytes, decode)
