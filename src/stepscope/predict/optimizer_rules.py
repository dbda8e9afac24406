"""Update rules of optimizers (Adam, SGD), and what each form of them costs.

Measured on an H200: Adam with GPT-2 small, the models of benchmarks/workloads and a stack of linear
layers (docs/records/predictions.md); SGD with three of those models and 200 million parameters in
40 tensors.
On a CPU (one core of an ARM server, torch 2.13): 1 to 100 tensors of 64 to 4 million elements.
"""

from __future__ import annotations

import msgspec


class UpdateForm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the update: loop, foreach or fused.

    Only ratios of the host's times are used, so a slow host stays slow.
    """

    step_us: float  # of the host, per step
    tensor_us: float  # of the host, per tensor
    element_ns: float = 0.0  # of the host, per parameter: on a CPU
    bytes_each: float = 0.0  # per parameter, at the device's full bandwidth
    launches: float = 0.0  # per million parameters
    fewest: int = 1  # launches
    order: int  # the later form replaces the earlier one

    def host_us(self, tensors: int, elements: int) -> float:
        return self.step_us + self.tensor_us * tensors + self.element_ns * elements / 1e3


class UpdateRule(msgspec.Struct, frozen=True, kw_only=True):
    """How parameters are updated, in each of its forms."""

    name: str
    forms: dict[str, UpdateForm]  # with a GPU
    cpu_forms: dict[str, UpdateForm]
    state_bytes: int  # per fp32 parameter, with what the optimizer keeps
    fused: bool = True  # PyTorch has a fused form for a GPU
    fused_on_cpu: bool = True


def _cpu_forms(
    loop: tuple[float, ...], foreach: tuple[float, ...], fused: tuple[float, ...]
) -> dict[str, UpdateForm]:
    measured = (("loop", loop), ("foreach", foreach), ("fused", fused))
    return {
        form: UpdateForm(step_us=step, tensor_us=tensor, element_ns=element, order=order)
        for order, (form, (step, tensor, element)) in enumerate(measured)
    }


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
    cpu_forms=_cpu_forms((95, 82.0, 3.9), (265, 31.5, 4.0), (125, 9.0, 2.1)),
    state_bytes=12,
)
MOMENTUM = UpdateRule(
    name="SGD with momentum",
    forms=_forms((600, 42.0, 58.0, 0.0), (450, 8.9, 55.0, 0.2), (190, 5.3, 25.0, 0.05)),
    cpu_forms=_cpu_forms((55, 23.2, 1.17), (124, 8.9, 1.17), (82, 3.5, 0.72)),
    state_bytes=8,
)
PLAIN = UpdateRule(
    name="SGD",
    forms=_forms((90, 14.0, 18.0, 0.0), (200, 1.9, 15.0, 0.05), (200, 1.8, 16.0, 0.05)),
    cpu_forms=_cpu_forms((37, 5.1, 0.46), (71, 2.8, 0.50), (74, 2.1, 0.48)),
    state_bytes=4,
)
ADAGRAD = UpdateRule(
    name="Adagrad",
    forms=ADAM.forms,
    cpu_forms=_cpu_forms((71, 44.0, 2.2), (187, 19.7, 2.6), (102, 8.2, 1.4)),
    state_bytes=8,
    fused=False,
)
