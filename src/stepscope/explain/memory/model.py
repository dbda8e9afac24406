"""What a step's operator shapes say about the model: its layers, its casts, a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.memory.lifetimes import BACKWARD
from stepscope.records.dtypes import PROFILER_BYTES
from stepscope.records.explanation import Steps
from stepscope.records.memory import CATEGORIES, ActivationTheory, Memory, Theory, ZeroRow
from stepscope.records.trace import HostKind, Trace
from stepscope.step.arrays import Indices
from stepscope.step.call_tree import enclosing, outermost
from stepscope.step.work import rows_named
from stepscope.text.figures import size
from stepscope.text.words import counted
from stepscope.trace.links import nearest, nearest_of

if TYPE_CHECKING:
    Sizes = tuple[int, int, int]

ATTENTION = "aten::scaled_dot_product_attention"
_SOFTMAX = ("aten::softmax", "aten::_softmax")
_LINEAR = "aten::linear"
_CONVOLUTIONS = tuple(
    f"aten::{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3)
)
EMBEDDING = "aten::embedding"
FED = (EMBEDDING, _LINEAR, *_CONVOLUTIONS)  # one of them meets the batch first
_NARROW = ("c10::Half", "c10::BFloat16")
_BYTES = {name: PROFILER_BYTES[name] for name in ("float", "double", *_NARROW)}
_FETCH = "enumerate(DataLoader)"  # torch marks every fetch


class ShapedCall(msgspec.Struct, frozen=True):
    """One operator's name, input shapes and input types."""

    name: str
    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]

    def dims(self, place: int) -> list[int]:
        """The shape of one input; empty if it is no tensor."""
        dims = self.shapes[place] if place < len(self.shapes) else []
        whole = isinstance(dims, list) and all(isinstance(size, int) for size in dims)
        return dims if whole else []

    def width(self, place: int) -> int | None:
        """Bytes of an element of one input."""
        return _BYTES.get(self.dtypes[place]) if place < len(self.dtypes) else None


class StepCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The shaped operators of one forward pass, outermost of each name, in order.

    A step that accumulates gradients runs one pass per micro-batch, and each pass frees what it
    kept before the next begins.
    """

    calls: tuple[ShapedCall, ...]
    cast_bytes: int
    micro_batches: int = 1  # passes of this kind in the step
    fetches: float = 0.0  # batches that a DataLoader gave, in a mean step of the trace

    @property
    def batches_per_step(self) -> int | None:
        """None if passes share a batch: it may be split, or read again (adversarial training)."""
        is_shared = 0 < round(self.fetches) < self.micro_batches
        return None if is_shared else self.micro_batches


def read_calls(trace: Trace, steps: Steps) -> StepCalls | None:
    """The longest forward pass of the last marked step that trains or, without steps, of the
    trace. A program that ends inside a step leaves a last one without operators."""
    host = trace.host
    wanted = (*FED, ATTENTION, *_SOFTMAX, "aten::layer_norm", "aten::native_dropout")
    operator = host.kind == HostKind.OPERATOR
    named = rows_named(trace, host, operator & (host.shapes >= 0), lambda name: name in wanted)
    backward = rows_named(trace, host, operator, lambda name: name.startswith(BACKWARD))
    here = _in_last_step(trace, steps, (backward, named))
    rows = np.flatnonzero(named & here)
    rows = rows[nearest_of(host, backward, rows) < 0]
    if not len(rows):
        return None
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    passes = _split_passes(host.start_ns[rows], np.sort(host.start_ns[backward & here]))
    names = [tuple(host.name[rows[one_pass]].tolist()) for one_pass in passes]
    # The first of equals: autocast may keep its casts of weights for the passes after it.
    longest = max(range(len(passes)), key=lambda place: len(names[place]))
    rows = rows[passes[longest]]
    cast = _cast_bytes(trace, rows)
    rows = rows[outermost(enclosing(host, rows), host.name[rows])]
    alike = names.count(names[longest])
    return StepCalls(
        calls=_decode(trace, rows),
        cast_bytes=cast,
        micro_batches=alike,
        fetches=_mean_fetches(trace, steps),
    )


def _mean_fetches(trace: Trace, steps: Steps) -> float:
    if not steps.steps:
        return 0.0
    host = trace.host
    annotation = host.kind == HostKind.ANNOTATION
    fetch = rows_named(trace, host, annotation, lambda name: name.startswith(_FETCH))
    first, last = steps.steps[0], steps.steps[-1]
    inside = (host.start_ns >= first.start_ns) & (host.start_ns < last.start_ns + last.dur_ns)
    return float((fetch & inside).sum()) / len(steps.steps)


def _in_last_step(
    trace: Trace, steps: Steps, wanted: tuple[NDArray[np.bool_], ...]
) -> NDArray[np.bool_]:
    """Rows of the last step that has some of the first `wanted` rows, else of the next ones."""
    start = trace.host.start_ns
    for rows in wanted:
        for step in reversed(steps.steps):
            inside = (start >= step.start_ns) & (start < step.start_ns + step.dur_ns)
            if (inside & rows).any():
                return inside
    return np.full(len(start), not steps.steps)


def _split_passes(
    forward_ns: NDArray[np.int64], backward_ns: NDArray[np.int64]
) -> list[slice[int, int]]:
    """Slices of `forward_ns` (sorted) between backward passes. A forward that no backward follows,
    such as an evaluation at the end of a step, counts only if there is nothing else."""
    before = np.searchsorted(backward_ns, forward_ns)
    edges = [0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(forward_ns)]
    passes = [slice(start, end) for start, end in pairwise(edges)]
    trained = [one_pass for one_pass in passes if before[one_pass.start] < len(backward_ns)]
    return trained or passes


def _decode(trace: Trace, rows: Indices) -> tuple[ShapedCall, ...]:
    """Each distinct name with its shapes and types is read once."""
    host = trace.host
    columns = (column[rows].tolist() for column in (host.name, host.shapes, host.dtypes))
    keys = list(zip(*columns, strict=True))
    known = {key: _call(trace.strings, *key) for key in dict.fromkeys(keys)}
    return tuple(call for key in keys if (call := known[key]) is not None)


def _call(strings: tuple[str, ...], name: int, shapes: int, dtypes: int) -> ShapedCall | None:
    try:
        dims = msgspec.json.decode(strings[shapes], type=list[Any])
        types = msgspec.json.decode(strings[dtypes], type=list[Any]) if dtypes >= 0 else []
    except msgspec.DecodeError:
        return None
    return ShapedCall(strings[name], tuple(dims), tuple(str(dtype) for dtype in types))


def _cast_bytes(trace: Trace, rows: Indices) -> int:
    """Weights that autocast copies to a narrower type for linear layers and convolutions.

    The copy is made inside the layer and has the shape of its weight or bias. Autograd keeps it,
    and its size does not depend on the batch.
    """
    host = trace.host
    layers = np.zeros(len(host), np.bool_)
    layers[rows] = True
    layers &= rows_named(trace, host, layers, lambda name: name in (_LINEAR, *_CONVOLUTIONS))
    shaped = (host.kind == HostKind.OPERATOR) & (host.shapes >= 0)
    copies = rows_named(trace, host, shaped, lambda name: name == "aten::copy_")
    inside = np.flatnonzero(copies & (nearest(host, layers) >= 0))
    around = nearest_of(host, layers, inside)
    columns = (host.shapes[inside], host.dtypes[inside], host.shapes[around])
    pairs = Counter(zip(*(column.tolist() for column in columns), strict=True))
    return sum(count * _cast(trace.strings, *pair) for pair, count in pairs.items())


def _cast(strings: tuple[str, ...], shapes: int, dtypes: int, layer: int) -> int:
    copy = _call(strings, shapes, shapes, dtypes)
    around = _call(strings, layer, layer, -1)
    if copy is None or around is None or len(copy.dtypes) < 2:
        return 0
    to, source = copy.dtypes[:2]
    of_weight = copy.dims(0) and copy.dims(0) in (around.dims(1), around.dims(2))
    narrows = to in _NARROW and source == "float"
    return int(np.prod(copy.dims(0))) * _BYTES[to] if of_weight and narrows else 0


def find_transformer(step: StepCalls) -> Transformer | None:
    """None unless the step consists of equal attention blocks with two norms each."""
    attention = [call for call in step.calls if call.name == ATTENTION]
    fused = bool(attention)
    scores = attention or [
        call
        for call in step.calls
        if call.name in _SOFTMAX and len(dims := call.dims(0)) == 4 and dims[-1] == dims[-2]
    ]
    norms = [call for call in step.calls if call.name == "aten::layer_norm"]
    alike = all(call == scores[0] for call in scores)
    if not scores or not alike or len(norms) < 2 * len(scores):
        return None
    dims, width = scores[0].dims(0), (norms[0].dims(0) or [0])[-1]
    if len(dims) != 4 or not width or dims[1] == 0:
        return None
    batch, heads, length, last = dims
    head_width = last if fused else width // heads
    middle = _feedforward(step, width, len(scores))
    compute = scores[0].width(0)
    residual = norms[0].width(0)
    if middle is None or compute is None or residual is None:
        return None
    keys = scores[0].dims(1) if fused else dims
    return Transformer(
        layers=len(scores),
        width=width,
        heads=heads,
        key_heads=keys[1] if len(keys) == 4 else heads,
        head_width=head_width,
        length=length,
        batch=batch,
        feedforward=middle[0],
        gated=middle[1],
        vocabulary=_vocabulary(step, width),
        compute_bytes=compute,
        residual_bytes=residual,
        fused_attention=fused,
        dropout_bytes=sum(
            int(np.prod(call.dims(0))) for call in step.calls if call.name == "aten::native_dropout"
        ),
        cast_bytes=step.cast_bytes,
    )


def linear_elements(step: StepCalls) -> int:
    """Elements of the weights of linear layers, which autocast would cast."""
    return sum(int(np.prod(call.dims(1))) for call in step.calls if call.name == _LINEAR)


def _feedforward(step: StepCalls, width: int, layers: int) -> tuple[int, bool] | None:
    """The inner width, and whether two projections lead up to it."""
    weights = Counter(tuple(c.dims(1)) for c in step.calls if c.name == _LINEAR)
    for (out, into), count in ((k, v) for k, v in weights.items() if len(k) == 2):
        if into == width and out != width and weights.get((into, out), 0) >= layers:
            return out, count >= 2 * layers
    return None


def _vocabulary(step: StepCalls, width: int) -> int | None:
    """The last linear layer's outputs, if an embedding has as many rows."""
    rows = {c.dims(0)[0] for c in step.calls if c.name == "aten::embedding" and c.dims(0)}
    linear = [c for c in step.calls if c.name == _LINEAR]
    last = linear[-1].dims(1) if linear else []
    return last[0] if len(last) == 2 and last[1] == width and last[0] in rows else None


# Arithmetic on bytes: what a rank holds at each ZeRO stage, what a transformer keeps for
# backward; and bytes in sentences.

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
