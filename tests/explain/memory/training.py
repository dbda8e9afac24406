"""A training on a device, written by hand event by event: every byte is known.

The model has 4096 bytes of parameters; AdamW keeps 8192, and 1024 are a workspace. A step releases
the gradients, runs forward (2000 of activations, 300 of a temporary, a loss of 512 that the script
holds until the next step), backward (a temporary of 700, the gradients) and the optimizer's step (a
temporary of 4096).
"""

from __future__ import annotations

from typing import Any

from .. import build

PARAMETERS, STATE, WORKSPACE = 4096, 8192, 1024
ACTIVATIONS, TEMPORARY, LOSS, IN_BACKWARD, IN_STEP = 2000, 300, 512, 700, 4096
RESERVED = 65536
KEPT = PARAMETERS + STATE + WORKSPACE
PEAK = KEPT + LOSS + PARAMETERS + IN_STEP  # inside the optimizer's step
PERIOD = 1000  # microseconds a step


class Recorder:
    """Allocator events with running totals."""

    def __init__(self, held: int, *, device_type: int = 1, reserved: int = RESERVED) -> None:
        self.events: build.Events = []
        self.held = held
        self._type, self._reserved = device_type, reserved

    def move(self, at: float, size: int, address: int, thread: int = build.MAIN) -> None:
        self.held += size
        self.events += instant(
            at,
            size,
            address,
            thread=thread,
            device_type=self._type,
            allocated=self.held,
            reserved=self._reserved,
        )


def instant(
    at: float,
    size: int,
    address: int,
    *,
    allocated: int,
    reserved: int,
    thread: int = build.MAIN,
    device_type: int = 1,
) -> build.Events:
    (event,) = build.op("[memory]", start=at, dur=0, thread=thread)
    del event["dur"]
    args: dict[str, Any] = {
        "Bytes": size,
        "Addr": address,
        "Device Type": device_type,
        "Device Id": 0 if device_type else -1,
        "Total Allocated": allocated,
        "Total Reserved": reserved,
    }
    return [event | {"ph": "i", "cat": "cpu_instant_event", "s": "t", "args": args}]


def train(
    steps: int = 3,
    *,
    first: int = 10,
    leak: int = 0,
    optimizer: str = "AdamW",
    keeps_gradients: bool = False,
) -> list[build.Events]:
    """Steps of a training that has been going on; `leak` bytes more stay behind in each."""
    recorder = Recorder(KEPT + PARAMETERS + LOSS)
    out: list[build.Events] = []
    for number in range(steps):
        out += _step(recorder, number * PERIOD, first + number, optimizer, keeps_gradients)
        if leak:
            recorder.move(number * PERIOD + 940, leak, 0x9000_0000 + number * 0x10_0000)
    return [*out, recorder.events]


def _step(
    recorder: Recorder, zero: float, number: int, optimizer: str, keeps_gradients: bool
) -> list[build.Events]:
    move = recorder.move
    if not keeps_gradients:
        move(zero + 20, -PARAMETERS, 0x4000)
    move(zero + 110, ACTIVATIONS, 0x1000)
    move(zero + 120, TEMPORARY, 0x2000)
    move(zero + 130, -TEMPORARY, 0x2000)
    move(zero + 210, LOSS, 0x3000 + 0x100 * (number % 2))
    move(zero + 220, -LOSS, 0x3000 + 0x100 * ((number + 1) % 2))
    move(zero + 410, IN_BACKWARD, 0x5000, build.AUTOGRAD)
    if not keeps_gradients:
        move(zero + 420, PARAMETERS, 0x4000, build.AUTOGRAD)
    move(zero + 430, -IN_BACKWARD, 0x5000, build.AUTOGRAD)
    move(zero + 440, -ACTIVATIONS, 0x1000, build.AUTOGRAD)
    move(zero + 710, IN_STEP, 0x6000)
    move(zero + 720, -IN_STEP, 0x6000)
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    return [
        build.step(number, start=zero, dur=950),
        build.note(f"Optimizer.zero_grad#{optimizer}.zero_grad", start=zero + 10, dur=30),
        build.frame("train.py(7): train", start=zero + 5, dur=900),
        build.frame("nn.Module: Linear_0", start=zero + 100, dur=50),
        build.op(
            "aten::linear",
            start=zero + 105,
            dur=40,
            shapes=[[8, 16], [32, 16], [32]],
            dtypes=["float", "float", "float"],
            sequence=number,
        ),
        build.op("aten::nll_loss", start=zero + 200, dur=30),
        build.op(backward, start=zero + 400, dur=100, thread=build.AUTOGRAD),
        build.op(
            "AddmmBackward0",
            start=zero + 401,
            dur=90,
            thread=build.AUTOGRAD,
            sequence=number,
            forward_thread=1,
        ),
        build.note(f"Optimizer.step#{optimizer}.step", start=zero + 700, dur=100),
        build.kernel("gemm", start=zero + 300, dur=50, launched_at=zero + 115),
    ]
