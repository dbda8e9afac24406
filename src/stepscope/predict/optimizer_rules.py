"""Update rules of optimizers (Adam's, SGD's) and what each form of them costs.

Measured on an H200: Adam with GPT-2 small, the models of benchmarks/workloads and a stack of linear
layers (docs/accuracy.md); SGD with three of those models and 200 million parameters in 40 tensors.
"""

from __future__ import annotations

import msgspec


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run it. Host times are shares of one another, so a slow host stays slow."""

    step_us: float  # of the host, once a step
    tensor_us: float  # and for each tensor
    bytes_each: float  # for each parameter, at the full bandwidth
    launches: float  # for each million parameters, and a few at least
    fewest: int
    order: int

    def host_us(self, tensors: int) -> float:
        return self.step_us + self.tensor_us * tensors


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What is updated."""

    name: str
    kinds: dict[str, Kind]
    state_bytes: int  # of a parameter in fp32 with what the optimizer keeps
    fused: bool = True  # has such a form on a device


def _kinds(
    loop: tuple[float, ...], foreach: tuple[float, ...], fused: tuple[float, ...]
) -> dict[str, Kind]:
    names = ("step_us", "tensor_us", "bytes_each", "launches")
    given = (("loop", loop, 8), ("foreach", foreach, 8), ("fused", fused, 4))
    return {
        name: Kind(**dict(zip(names, numbers, strict=True)), fewest=fewest, order=order)
        for order, (name, numbers, fewest) in enumerate(given)
    }


ADAM = Rule(
    name="Adam",
    kinds=_kinds((700, 107.0, 109.0, 0.0), (890, 17.0, 93.0, 0.42), (470, 6.0, 36.0, 0.06)),
    state_bytes=12,
)
MOMENTUM = Rule(
    name="SGD with momentum",
    kinds=_kinds((600, 42.0, 58.0, 0.0), (450, 8.9, 55.0, 0.2), (190, 5.3, 25.0, 0.05)),
    state_bytes=8,
)
PLAIN = Rule(
    name="SGD",
    kinds=_kinds((90, 14.0, 18.0, 0.0), (200, 1.9, 15.0, 0.05), (200, 1.8, 16.0, 0.05)),
    state_bytes=4,
)
