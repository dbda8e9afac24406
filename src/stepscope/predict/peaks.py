"""Peak memory with another batch or with blocks recomputed.

Measured memory comes first. Without it, a transformer that Adam or SGD trains is worked out by
arithmetic. Its peak is where backward begins: parameters, optimizer state, everything kept for
backward and the loss's gradient, but no gradients of parameters yet. With few samples the peak is
in the optimizer's step, which holds all gradients, and one more copy in its foreach form.
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
_DOUBT = 0.05  # of what arithmetic says


class PeakParts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the peak, by what they depend on."""

    fixed_bytes: int
    blocks_bytes: int  # kept by the blocks for backward
    inputs_bytes: int  # the part of them that goes into each block
    outside_bytes: int  # kept by embedding, head and loss
    optimizer_bytes: int  # the optimizer's own peak

    def peak_bytes(self, kept_bytes: float) -> float:
        return max(self.fixed_bytes + kept_bytes, self.optimizer_bytes)


def peak_at_batch(context: StepContext, factor: float) -> PeakMemory | None:
    """At `factor` times the trace's batch; None if it cannot be known."""
    if context.memory is not None and context.memory.largest_batch is not None:
        size, low, high = predict_peak(context.memory, factor)
        return PeakMemory(size_bytes=size, low_bytes=low, high_bytes=high)
    parts = _find_parts(context)
    if parts is None:
        return None
    return _with_doubt(parts.peak_bytes(factor * (parts.blocks_bytes + parts.outside_bytes)))


def peak_with_checkpoints(context: StepContext) -> PeakMemory | None:
    """With the inputs of each block kept and the rest recomputed."""
    parts = _find_parts(context)
    if parts is None:
        return None
    after = parts.peak_bytes(parts.inputs_bytes + parts.outside_bytes)
    now = parts.peak_bytes(parts.blocks_bytes + parts.outside_bytes)
    measured = context.memory.peak_bytes if context.memory is not None else now
    return _with_doubt(measured - (now - after))


def _find_parts(context: StepContext) -> PeakParts | None:
    model = find_transformer(context.calls) if context.calls else None
    if model is None or context.parameters is None:
        return None
    rule = context.rule
    if not rule.fused:  # what other optimizers keep is not known
        return None
    tokens = model.batch * model.length
    outside = token_bytes(replace(model, layers=0)) * tokens
    kept = transformer_activations(model, None).total_bytes - model.cast_bytes
    return PeakParts(
        fixed_bytes=rule.state_bytes * context.parameters.elements + model.cast_bytes,
        blocks_bytes=kept - outside,
        inputs_bytes=model.layers * tokens * model.width * model.residual_bytes,
        outside_bytes=outside + _loss_bytes(model, tokens),
        optimizer_bytes=_bytes_in_step(context, rule) * context.parameters.elements,
    )


def _bytes_in_step(context: StepContext, rule: UpdateRule) -> int:
    """Per parameter: its state, its gradient, and the copy that foreach makes."""
    copied = current_form(context) == "foreach" and rule.state_bytes > _FLOAT
    return rule.state_bytes + _FLOAT + (_FLOAT if copied else 0)


def _loss_bytes(model: Transformer, tokens: int) -> int:
    """The gradient of the logits in fp32; without autocast the logits themselves are alive too."""
    logits = tokens * (model.vocabulary or 0) * 4
    return logits if model.compute_bytes < 4 else 2 * logits


def _with_doubt(size: float) -> PeakMemory:
    return PeakMemory(
        size_bytes=round(size),
        low_bytes=round(size * (1 - _DOUBT)),
        high_bytes=round(size * (1 + _DOUBT)),
    )
