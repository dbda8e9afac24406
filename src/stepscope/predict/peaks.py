"""Peak memory with another batch or with blocks recomputed.

From what was measured where it was; else, for a transformer that Adam or SGD trains, by arithmetic:
the peak stands where backward begins, with parameters, optimizer state, everything kept for
backward, and the loss's gradient, but no gradients of parameters yet. With few samples it stands in
the optimizer's step, which keeps gradients, and whose foreach form makes one copy more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.explain.memory.batch import predict_peak
from stepscope.explain.memory.model import find_transformer
from stepscope.explain.memory.theory import token_bytes, transformer_activations
from stepscope.predict.optimizer_updates import current_form
from stepscope.records.prediction import PeakMemory

if TYPE_CHECKING:
    from stepscope.explain.memory.theory import Transformer
    from stepscope.predict.optimizer_rules import UpdateRule
    from stepscope.predict.step_context import StepContext

_FLOAT = 4
_UNSURE = 0.05  # of what arithmetic says


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the peak, by what they depend on."""

    fixed_bytes: int
    blocks_bytes: int  # kept by the blocks for backward
    inputs_bytes: int  # of those, what goes into each block
    outside_bytes: int  # of embedding, head and loss
    optimizer_bytes: int  # the optimizer's own peak

    def peak_bytes(self, scaling_bytes: float) -> float:
        """With so much kept for backward."""
        return max(self.fixed_bytes + scaling_bytes, self.optimizer_bytes)


def peak_at_batch(context: StepContext, factor: float) -> PeakMemory | None:
    """At so many times the trace's batch; None where nothing tells."""
    if context.memory is not None and context.memory.largest_batch is not None:
        size, low, high = predict_peak(context.memory, factor)
        return PeakMemory(size_bytes=size, low_bytes=low, high_bytes=high)
    found = _arithmetic(context)
    if found is None:
        return None
    return _around(found.peak_bytes(factor * (found.blocks_bytes + found.outside_bytes)))


def peak_with_checkpoints(context: StepContext) -> PeakMemory | None:
    """With every block's inputs kept and the rest of it recomputed."""
    found = _arithmetic(context)
    if found is None:
        return None
    kept = found.peak_bytes(found.inputs_bytes + found.outside_bytes)
    now = found.peak_bytes(found.blocks_bytes + found.outside_bytes)
    measured = context.memory.peak_bytes if context.memory is not None else now
    return _around(measured - (now - kept))


def _arithmetic(context: StepContext) -> Arithmetic | None:
    model = find_transformer(context.calls) if context.calls else None
    if model is None or context.parameters is None:
        return None
    rule = context.rule
    if not rule.fused:  # what another one keeps is not known
        return None
    tokens = model.batch * model.length
    outside = token_bytes(replace(model, layers=0)) * tokens
    kept = transformer_activations(model, None).total_bytes - model.cast_bytes
    return Arithmetic(
        fixed_bytes=rule.state_bytes * context.parameters.elements + model.cast_bytes,
        blocks_bytes=kept - outside,
        inputs_bytes=model.layers * tokens * model.width * model.residual_bytes,
        outside_bytes=outside + _of_loss(model, tokens),
        optimizer_bytes=_in_step(context, rule) * context.parameters.elements,
    )


def _in_step(context: StepContext, rule: UpdateRule) -> int:
    """Of a parameter: with its gradient, and a copy that foreach makes."""
    copied = current_form(context) == "foreach" and rule.state_bytes > _FLOAT
    return rule.state_bytes + _FLOAT + (_FLOAT if copied else 0)


def _of_loss(model: Transformer, tokens: int) -> int:
    """The gradient of the logits in fp32; without autocast the logits themselves are alive too."""
    logits = tokens * (model.vocabulary or 0) * 4
    return logits if model.compute_bytes < 4 else 2 * logits


def _around(size: float) -> PeakMemory:
    return PeakMemory(
        size_bytes=round(size),
        low_bytes=round(size * (1 - _UNSURE)),
        high_bytes=round(size * (1 + _UNSURE)),
    )
