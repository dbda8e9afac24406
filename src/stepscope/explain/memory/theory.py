"""Arithmetic on bytes: what a rank holds at each ZeRO stage, what a transformer keeps for
backward; and bytes in sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.memory import CATEGORIES, ActivationTheory, Memory, Theory, ZeroRow
from stepscope.text.figures import size
from stepscope.text.words import counted

if TYPE_CHECKING:
    Sizes = tuple[int, int, int]

# Pure functions. Sizes are bytes; P is the number of ranks that share.
#
# ZeRO divides optimizer state (stage 1), gradients too (2), parameters too (3). With mixed-
# precision Adam a parameter takes 2 + 2 + 12 bytes: 16, 4 + 12/P, 2 + 14/P, 16/P. Communication is
# that of plain data parallelism in stages 1 and 2, and 1.5 times it in stage 3, which gathers
# parameters twice.

STAGES = (0, 1, 2, 3)
RANKS = tuple(2**power for power in range(11))  # 1 to 1024
VOLUME = (1.0, 1.0, 1.0, 1.5)
MIXED_ADAM = (2, 2, 12)  # bytes of a parameter, its gradient, its optimizer state


def zero_bytes(stage: int, ranks: int, *, parameters: int, gradients: int, optimizer: int) -> int:
    """What each rank holds; what does not divide evenly is padded."""
    whole, divided = _split(stage, (parameters, gradients, optimizer))
    return sum(whole) + sum(-(-size // ranks) for size in divided)


def bytes_per_parameter(stage: int, ranks: int) -> float:
    """The same of one parameter with mixed-precision Adam."""
    whole, divided = _split(stage, MIXED_ADAM)
    return sum(whole) + sum(divided) / ranks


def _split(stage: int, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What every rank holds, and what the ranks divide: the last `stage` of the sizes."""
    return sizes[: 3 - stage], sizes[3 - stage :]


def zero_table(*, parameters: int, gradients: int, optimizer: int) -> tuple[ZeroRow, ...]:
    return tuple(
        ZeroRow(
            stage=stage,
            ranks=count,
            size_bytes=zero_bytes(
                stage, count, parameters=parameters, gradients=gradients, optimizer=optimizer
            ),
            volume=VOLUME[stage],
        )
        for stage in STAGES
        for count in RANKS
    )


def whole_model(measured: Sizes, *, stage: int, shards: int) -> Sizes:
    """Parameters, gradients and optimizer state before they were divided over `shards` ranks."""
    whole, divided = _split(stage, measured)
    parameters, gradients, optimizer = (*whole, *(size * shards for size in divided))
    return parameters, gradients, optimizer


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer as the shapes of its operators tell it."""

    layers: int
    width: int
    heads: int
    key_heads: int  # as many, or fewer where queries share keys and values
    head_width: int
    length: int
    batch: int
    feedforward: int
    gated: bool  # two projections up, multiplied
    vocabulary: int | None  # None: no head over a vocabulary
    compute_bytes: int  # of an element in matrix products
    residual_bytes: int  # of an element between blocks
    fused_attention: bool  # scores are never stored
    dropout_bytes: int = 0  # masks of a whole step
    cast_bytes: int = 0  # weights cast to the compute type: they do not grow with the batch


def token_bytes(model: Transformer) -> int:
    """Kept for backward, for one token of the sequence.

    A block keeps: the inputs of both norms (residual type); the outputs of both norms, queries,
    keys, values and the attention's output; what goes into and comes out of the activation (a
    gated one keeps both projections, the activation and their product); of attention either one
    log-sum for each head or the scores. After the blocks: the last norm's input and output, and
    of the loss the log-probabilities in fp32 (under autocast once more in the compute type).
    """
    e, r, h = model.compute_bytes, model.residual_bytes, model.width
    attention = model.heads * model.head_width
    keys = 2 * model.key_heads * model.head_width
    middle = (4 if model.gated else 2) * model.feedforward
    scores = model.heads * (4 if model.fused_attention else model.length * e)
    block = 2 * r * h + (2 * h + 2 * attention + keys + middle) * e + scores
    head = 0
    if model.vocabulary is not None:
        head = (r + e) * h + model.vocabulary * (4 + (e if e < 4 else 0))
    return model.layers * block + head


def formula_words(model: Transformer) -> str:
    """The same as a formula with this model's sizes put in."""
    per_block = f"2rh + (2h + 2ad + 2kd + {4 if model.gated else 2}f)e + "
    per_block += "4a" if model.fused_attention else "ase"
    head = ""
    if model.vocabulary is not None:
        head = " + (r + e)h + " + ("(4 + e)V" if model.compute_bytes < 4 else "4V")
    sizes = (
        f"L={model.layers}, h={model.width}, a={model.heads}, k={model.key_heads}, "
        f"d={model.head_width}, f={model.feedforward}, s={model.length}, b={model.batch}, "
        f"V={model.vocabulary or 0}, e={model.compute_bytes}, r={model.residual_bytes}"
    )
    cast = " + cast weights" if model.cast_bytes else ""
    dropout = " + dropout masks" if model.dropout_bytes else ""
    return f"b·s·[L·({per_block}){head}]{dropout}{cast} with {sizes}"


def transformer_activations(model: Transformer, measured_bytes: int | None) -> ActivationTheory:
    """The formula's answer for the batch at hand."""
    per_sample = token_bytes(model) * model.length + model.dropout_bytes // max(model.batch, 1)
    return ActivationTheory(
        model=f"transformer of {counted(model.layers, 'block')}, nothing recomputed",
        formula=formula_words(model),
        per_sample_bytes=per_sample,
        total_bytes=per_sample * model.batch + model.cast_bytes,
        measured_bytes=measured_bytes,
    )


def make_theory(
    measured: Sizes, *, sharding: tuple[int, int] | None, activations: ActivationTheory | None
) -> Theory:
    """`measured` is a rank's parameters, gradients and optimizer state; `sharding` (stage, P)."""
    stage, shards = sharding or (0, 1)
    parameters, gradients, optimizer = whole_model(measured, stage=stage, shards=shards)
    sharded = (
        f"the model is already sharded over {shards} ranks (ZeRO stage {stage}): the whole is "
        "what this rank holds times that"
    )
    return Theory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        shards=shards,
        zero=zero_table(parameters=parameters, gradients=gradients, optimizer=optimizer),
        activations=activations,
        notes=(sharded,) if shards > 1 else (),
    )


# Bytes in sentences: what findings say about memory.

LABELS = {name: name for name in CATEGORIES} | {"optimizer": "optimizer state"}


def biggest(memory: Memory) -> str:
    held = {n: amount for n, amount in memory.categories.items() if amount and n != "other"}
    if held:
        name = max(held, key=lambda name: held[name])
        return f"{LABELS[name]} ({size(held[name])})"
    if memory.by_site:
        site = memory.by_site[0]
        place = f"{site.file}:{site.line}" if site.file else site.operator
        return f"from {place} ({size(site.size_bytes)})"
    return "not known"


def held_words(memory: Memory) -> list[str]:
    """One line: what is held at the peak or, if that is unknown, what allocated it."""
    held = {name: amount for name, amount in memory.categories.items() if amount}
    if set(held) - {"other"}:
        ranked = sorted(held, key=lambda name: -held[name])
        return ["at the peak: " + ", ".join(f"{LABELS[n]} {size(held[n])}" for n in ranked[:4])]
    places = [site for site in memory.by_site if site.file][:3]
    if not places:
        return []
    named = (f"{site.file}:{site.line} {size(site.size_bytes)}" for site in places)
    return ["allocated by " + ", ".join(named)]


def between_words(
    low: float | None, high: float | None, write: Callable[[float], str] = "{:,}".format
) -> str:
    """A range in brackets; without a high end, only the low one."""
    if low is None:
        return ""
    if high is None:
        return f" (at least {write(low)})"
    return f" ({write(low)} to {write(high)})"
