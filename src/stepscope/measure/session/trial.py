"""A trial of a remedy: a few dozen steps, of which losses and the peak of memory are kept.

The losses are the tensors that backward passes start from, before a GradScaler scales them. They
stay on the device until the trial ends: reading them earlier would make the training wait.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.cuda_graphs import gate
from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import unseen

if TYPE_CHECKING:
    from stepscope.fix.begin import ChangedTraining

TRIAL, SCRIPT, ENOUGH = "trial.json", "script.json", "enough"
_MOST_ELEMENTS = 1 << 20  # of an output that is not a scalar: their sum stands for them
_MOST_LOSSES = 100_000
_WAIT_S, _LOOK_S = 10.0, 0.02
_KILO = 1 << 10


class TrialLog:
    """What a rank keeps beside its steps while it is on trial."""

    def __init__(
        self, training: ChangedTraining | None, stop_after: int, *, keep_losses: bool = True
    ) -> None:
        self._training = training
        self.keeps_losses = keep_losses  # of every pass
        self.stop_after = stop_after or sys.maxsize
        self._losses: list[tuple[int, Any]] = []
        self._before_scaling: tuple[Any, Any] | None = None
        self._has_passes = False

    @never_raise
    def scaled(self, loss: Any, result: Any) -> None:
        """A GradScaler made `result` of `loss`."""
        self._before_scaling = (result, loss)

    @never_raise
    def pass_begins(self, outputs: Any, step: int) -> None:
        """`outputs` are the tensors that backward starts from."""
        self._has_passes = True
        self._keep_loss(outputs, step)

    @never_raise
    def gradient_was_taken(self, outputs: Any, step: int) -> None:
        """By torch.autograd.grad: a loss only in a script that calls no backward."""
        if not self._has_passes:
            self._keep_loss(outputs, step)

    def _keep_loss(self, outputs: Any, step: int) -> None:
        if not self.keeps_losses or gate.is_capturing or len(self._losses) >= _MOST_LOSSES:
            return
        outputs = [outputs] if hasattr(outputs, "detach") else list(outputs)
        total = None
        with unseen():
            for output in outputs:
                value = self._value(output)
                if value is not None:
                    total = value if total is None else total + value
        if total is not None:
            self._losses.append((step, total))
        self._before_scaling = None

    def _value(self, output: Any) -> Any:
        """A copy: what a CUDA graph returns is overwritten when it is replayed."""
        if self._before_scaling is not None and output is self._before_scaling[0]:
            output = self._before_scaling[1]
        if output.numel() == 1:
            return output.detach().clone().reshape(())
        return output.detach().double().sum() if output.numel() <= _MOST_ELEMENTS else None

    @never_raise
    def write(self, folder: Path) -> None:
        """When the rank closes."""
        if self.keeps_losses:
            content = {"schema": layout.SCHEMA, "losses": self._read(), "peak": _peak()}
            layout.try_write_json(folder / TRIAL, content)
        files = self._training.files() if self._training is not None else {}
        for name, content in files.items():
            layout.try_write_json(folder / name, content)
        facts = self._training.script_facts() if self._training is not None else None
        if facts is not None:
            layout.try_write_json(folder / SCRIPT, facts.to_json())

    def remedies(self) -> list[dict[str, Any]]:
        return self._training.content() if self._training is not None else []

    def _read(self) -> list[tuple[int, str]]:
        """Each with its step, to the last bit: Python writes floats as hexadecimal digits."""
        return [(step, float(value.item()).hex()) for step, value in self._losses]


@never_raise
def _peak() -> dict[str, int | None]:
    """Bytes that this process had at most: on its device as torch counts them, and on the host."""
    torch: Any = sys.modules["torch"]
    device = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.max_memory_allocated()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"device": device, "host": host * (_KILO if sys.platform == "linux" else 1)}


@never_raise
def await_device() -> None:
    """Until everything that was launched is done."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def end_process(folder: Path, world_size: int) -> None:
    """Every rank has seen enough once this rank and all others have: end without the rest of the
    script, which would evaluate, save or train on. `folder` is this rank's."""
    with contextlib.suppress(OSError):  # a full disk: the others wait their time, and end as well
        (folder / ENOUGH).touch()
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        # A rank that ended now would cut connections that others may still read from.
        if sum(1 for _ in folder.parent.glob(f"rank-*/{ENOUGH}")) >= world_size:
            break
        time.sleep(_LOOK_S)
    _end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@never_raise
def _end_children() -> None:
    """Workers of a DataLoader, which would notice only seconds later."""
    import multiprocessing

    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(1.0)
