"""Update rules of optimizers (Adam, SGD), and what each form of them costs.

Measured on an H200: Adam with GPT-2 small, the models of benchmarks/workloads and a stack of linear
layers (docs/accuracy.md); SGD with three of those models and 200 million parameters in 40 tensors.
"""

from __future__ import annotations

import msgspec


class UpdateForm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the update: loop, foreach or fused.

    Only ratios of the host's times are used, so a slow host stays slow.
    """

    step_us: float  # of the host, per step
    tensor_us: float  # of the host, per tensor
    bytes_each: float  # per parameter, at the full bandwidth
    launches: float  # per million parameters
    fewest: int  # launches
    order: int  # the later form replaces the earlier one

    def host_us(self, tensors: int) -> float:
        return self.step_us + self.tensor_us * tensors


class UpdateRule(msgspec.Struct, frozen=True, kw_only=True):
    """How parameters are updated, in each of its forms."""

    name: str
    forms: dict[str, UpdateForm]
    state_bytes: int  # per fp32 parameter, with what the optimizer keeps
    fused: bool = True  # PyTorch has a fused form


def _forms(
    loop: tuple[float, ...], foreach: tuple[float, ...], fused: tuple[float, ...]
) -> dict[str, UpdateForm]:
    names = ("step_us", "tensor_us", "bytes_each", "launches")
    measured = (("loop", loop, 8), ("foreach", foreach, 8), ("fused", fused, 4))
    return {
        form: UpdateForm(**dict(zip(names, numbers, strict=True)), fewest=fewest, order=order)
        for order, (form, numbers, fewest) in enumerate(measured)
    }


ADAM = UpdateRule(
    name="Adam",
    forms=_forms((700, 107.0, 109.0, 0.0), (890, 17.0, 93.0, 0.42), (470, 6.0, 36.0, 0.06)),
    state_bytes=12,
)
MOMENTUM = UpdateRule(
    name="SGD with momentum",
    forms=_forms((600, 42.0, 58.0, 0.0), (450, 8.9, 55.0, 0.2), (190, 5.3, 25.0, 0.05)),
    state_bytes=8,
)
PLAIN = UpdateRule(
    name="SGD",
    forms=_forms((90, 14.0, 18.0, 0.0), (200, 1.9, 15.0, 0.05), (200, 1.8, 16.0, 0.05)),
    state_bytes=4,
)
