"""Changes that are no remedies: they show what chance alone does to a training.

nudged-weights=PRECISION:N  Before its first forward, every weight of the model is moved by a random
                            share of the size that products of this precision round by.
other-draws=N               What the model draws in its forward passes, such as dropout, comes from
                            another stream of random numbers. The script's data keep theirs.

`tune` runs the command with them where the losses of a remedy look wrong: what a nudge of the
size of rounding does, a remedy that rounds otherwise may do too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal
from stepscope.fix.random_states import restore, states_now

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

NUDGED, REDRAWN = "nudged-weights", "other-draws"
_ROUNDS_BY = {"fp32": 2.0**-24, "tf32": 2.0**-11, "16-bits": 2.0**-9}
_FIRST_SEED = 7919


def nudge_weights(training: TrainingProcess, value: str) -> None:
    """Each root's parameters, once."""
    precision, _, number = value.partition(":")
    share, seed = _ROUNDS_BY[precision], _FIRST_SEED + int(number or 1)
    tell, nudged = training.telling(), set[int]()

    def nudge(root: Any) -> None:
        import torch

        for parameter in root.parameters():
            if id(parameter) in nudged or not parameter.is_floating_point():
                continue
            nudged.add(id(parameter))
            draw = torch.Generator(parameter.device).manual_seed(seed + len(nudged))
            with torch.no_grad():
                noise = torch.empty_like(parameter).uniform_(-share, share, generator=draw)
                parameter.mul_(1 + noise)
        tell("every weight moved by a random amount of the size of rounding")

    training.when_root(nudge)


def draw_others(training: TrainingProcess, value: str) -> None:
    """From the beginning of a root's forward to the beginning of backward."""
    streams = _TwoStreams(_FIRST_SEED + int(value or 1))
    tell = training.telling()

    def switch(*_call: Any) -> None:
        streams.use_other()
        tell("forward passes draw from another stream of random numbers")

    training.around_root(switch)
    training.before_backward(lambda _outputs: streams.use_own())


class _TwoStreams:
    """The random numbers of the script and others, each going on where it was left."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: list[Any] | None = None  # set aside while the others are used
        self._other: list[Any] | None = None

    def use_other(self) -> None:
        import torch

        if self._own is not None:
            return
        self._own = states_now()
        if self._other is None:
            torch.manual_seed(self._seed)
        else:
            restore(self._other)

    def use_own(self) -> None:
        if self._own is not None:
            self._other = states_now()
            restore(self._own)
            self._own = None


CONTROLS = {
    control.id: control
    for control in (
        Fix(
            id=NUDGED,
            effect=Effect.ROUNDING,
            fits=lambda _facts, _value: None,
            patch=lambda _script, _value: Proposal(),
            apply=nudge_weights,
            values=("fp32:1",),
        ),
        Fix(
            id=REDRAWN,
            effect=Effect.RANDOM,
            fits=lambda _facts, _value: None,
            patch=lambda _script, _value: Proposal(),
            apply=draw_others,
            values=("1",),
        ),
    )
}
