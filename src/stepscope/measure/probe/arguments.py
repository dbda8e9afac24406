"""The arguments of a recorded operator call, rebuilt with random tensors."""

from __future__ import annotations

import ast
import math
from typing import Any

import torch

from stepscope.records.dtypes import BY_NAME
from stepscope.text.words import lazy_pattern

# Dtypes that torch fills with random values, by the profiler's names and by their numbers.
_FILLED = [
    BY_NAME[name]
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
        *("uint8", "bool", "complex64", "complex128"),
    )
]
DTYPES = {name: getattr(torch, dtype.name) for dtype in _FILLED for name in dtype.profiler}
_NAMES = {getattr(torch, dtype.name): dtype.profiler[0] for dtype in _FILLED}
_NUMBERED = {dtype.number: getattr(torch, dtype.name) for dtype in _FILLED}
_FORMATS = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}
# Arguments that autograd has no derivative for.
_WITHOUT_GRADIENT = {"running_mean", "running_var", "target", "mask", "attn_mask", "index"}
# Whole numbers that kernels check, or that decide how long they take: where bags begin, how long
# sequences are, how many of them reach each time step, where groups of rows end.
_ORDERED = {
    "aten::_grouped_mm": "offs",
    "aten::_scaled_grouped_mm": "offs",
    "aten::embedding_bag": "offsets",
    "aten::_embedding_bag": "offsets",
    "aten::_pack_padded_sequence": "lengths",
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), "batch_sizes"),
}
_CLASSES = {"aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d"}
# Lists whose tensors the profiler names, perhaps followed by their dtype in brackets.
_LISTS = ("TensorList", "GenericList")
# Arguments, and operators, whose values must be probabilities: kernels check them.
_POSITIVE = {"running_var", "var", "invstd", "exp_avg_sqs", "state_sums"}
_PROBABILITIES = lazy_pattern(r"binary_cross_entropy$|bernoulli|multinomial|poisson|kl_div")
# Text arguments are not recorded.
_REDUCES = lazy_pattern(r"^aten::(?:scatter|index)_reduce_?$")


class CannotRebuildError(Exception):
    """The trace does not say enough about a call, or this torch has no such operator."""


class Recorded:
    """One call as the trace describes it: lists with one entry per argument."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.name: str = request["name"]
        self.shapes: list[Any] = request["shapes"]
        self.dtypes: list[str] = request["dtypes"]
        count = len(self.shapes)
        self.strides: list[Any] = request.get("strides") or [None] * count
        self.concrete: list[str] = request.get("concrete") or [""] * count
        self.grads: list[bool] = request.get("grads") or [False] * count

    @property
    def is_in_place(self) -> bool:
        return self.name.endswith("_") and not self.name.endswith("__")

    def is_list(self, place: int) -> bool:
        return self.dtypes[place].startswith(_LISTS)

    def dtype(self, place: int) -> torch.dtype:
        """Of an argument's tensors; those of a list are fp32 unless the request names another."""
        _, _, listed = self.dtypes[place].partition("[")
        return DTYPES.get(listed.removesuffix("]") if listed else self.dtypes[place], torch.float32)

    @property
    def listed(self) -> int:
        """How many tensors its longest list has."""
        lengths = [len(dims) for place, dims in enumerate(self.shapes) if self.is_list(place)]
        return max(lengths, default=0)


def find_operator(recorded: Recorded) -> Any:
    """The overload whose arguments match what was recorded."""
    if "::" not in recorded.name:
        raise CannotRebuildError("no operator of torch")
    namespace, _, name = recorded.name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
    except (AttributeError, RuntimeError):
        raise CannotRebuildError("this torch has no such operator") from None
    for strict in (True, False):
        for operator in overloads:
            if _matches(operator._schema.arguments, recorded, strict=strict):
                return operator
    raise CannotRebuildError("no form of the operator takes these arguments")


def name_of(dtype: torch.dtype) -> str:
    """As the profiler writes it; an unknown dtype keeps torch's name."""
    return _NAMES.get(dtype, str(dtype))


def input_bytes(recorded: Recorded) -> int:
    """What the tensors of a call take."""
    sizes = 0
    for place, dims in enumerate(recorded.shapes):
        width = recorded.dtype(place).itemsize
        each = dims if dims and isinstance(dims[0], list) else [dims]
        sizes += sum(math.prod(sides) * width for sides in each if sides)
    return sizes


def build_arguments(
    operator: Any, recorded: Recorded, device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    if any(argument.is_out for argument in operator._schema.arguments):
        recorded.grads = []  # autograd refuses tensors that are written into
    for place, argument in enumerate(operator._schema.arguments):
        value = _value(argument, place, recorded, device)
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return positional, keywords


def _matches(arguments: Any, recorded: Recorded, *, strict: bool) -> bool:
    """`strict`: as torch records calls today; traces of older ones leave numbers out."""
    if len(arguments) != len(recorded.shapes):
        return False
    return all(
        _fits(str(argument.type), recorded.dtypes[place], recorded.concrete[place], strict=strict)
        for place, argument in enumerate(arguments)
    )


def _fits(kind: str, dtype: str, text: str, *, strict: bool) -> bool:
    optional = kind.startswith("Optional[")
    inner = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    if dtype in DTYPES:
        return inner == "Tensor"
    if dtype.startswith(_LISTS):
        return inner.startswith("List[")
    if dtype == "" and strict:  # a number has a type, a list of numbers has none
        return optional or inner in ("List[number]", "List[int]", "List[float]", "List[bool]")
    if dtype == "":
        return optional or (inner != "Tensor" and not inner.startswith("List[Tensor"))
    if inner == "Tensor" or inner.startswith(("List[Tensor", "List[Optional")):
        return False
    if dtype == "ScalarList" or text.startswith("["):
        return inner.startswith("List[")
    # A name of a dimension is text to torch, and its number is not.
    is_text = text not in ("True", "False") and not text.lstrip("-").isdigit()
    return (is_text or inner != "str") and not inner.startswith("List[")


def _value(argument: Any, place: int, recorded: Recorded, device: torch.device) -> Any:
    dtype, text = recorded.dtypes[place], recorded.concrete[place]
    if dtype in DTYPES:
        steps = recorded.strides[place]
        return _tensor(argument, recorded, place, recorded.shapes[place], steps, device)
    if recorded.is_list(place):
        return _tensor_list(argument, recorded, place, device)
    if text == "":
        if str(argument.type) == "List[number]" and recorded.listed:
            return [1.0] * recorded.listed  # an optimizer's factors, one for each tensor
        if argument.name == "reduce" and _REDUCES.search(recorded.name):
            return "amax"  # sums have operators of their own; the traced time shows if it is wrong
        if argument.has_default_value():
            return argument.default_value
        if str(argument.type).startswith("Optional["):
            return None
        raise CannotRebuildError(f"the trace does not say its argument {argument.name}")
    return _plain(argument, text, device)


def _tensor_list(argument: Any, recorded: Recorded, place: int, device: torch.device) -> Any:
    shapes, strides = recorded.shapes[place], recorded.strides[place]
    if argument.name == "state_steps":  # counters of an optimizer
        shapes = [[]] * recorded.listed
    elif argument.name == "max_exp_avg_sqs" and "True" not in recorded.concrete:
        return []
    if not shapes or not all(isinstance(dims, list) for dims in shapes):
        raise CannotRebuildError(f"the trace does not say the tensors of {argument.name}")
    if not strides or len(strides) != len(shapes):
        strides = [None] * len(shapes)
    return [
        _tensor(argument, recorded, place, dims, steps, device)
        for dims, steps in zip(shapes, strides, strict=True)
    ]


def _tensor(
    argument: Any, recorded: Recorded, place: int, dims: Any, steps: Any, device: torch.device
) -> torch.Tensor:
    dtype = recorded.dtype(place)
    if not steps or len(steps) != len(dims):
        steps = torch.empty(dims, device="meta").stride()
    span = 1 + sum((side - 1) * step for side, step in zip(dims, steps, strict=True) if side)
    if dtype.is_floating_point or dtype.is_complex:
        positive = argument.name in _POSITIVE or _PROBABILITIES.search(recorded.name)
        random = torch.rand if positive else torch.randn
        flat = random(span, device=device, dtype=torch.float32).to(dtype)
    elif _ORDERED.get(recorded.name) == argument.name:
        at = device if argument.name in ("offsets", "offs") else "cpu"  # where torch wants lengths
        flat = _ordered(recorded, span).to(device=at, dtype=dtype)
    elif dtype == torch.bool:
        flat = torch.rand(span, device=device) < 0.5
    else:
        flat = torch.randint(0, _limit(recorded), (span,), device=device, dtype=dtype)
    tensor = flat.as_strided(dims, steps).detach()
    if not dims and argument.name == "other" and recorded.dtypes[place] in ("double", "long int"):
        return tensor.cpu()  # a number, which the kernel gets from the host
    wanted = place < len(recorded.grads) and recorded.grads[place]
    differentiable = dtype.is_floating_point and argument.name not in _WITHOUT_GRADIENT
    return tensor.requires_grad_(wanted and differentiable)


def _ordered(recorded: Recorded, count: int) -> torch.Tensor:
    """Bags and groups of one size; lengths that fall to half; sequences of which most are of one
    length."""
    name = _ORDERED[recorded.name]
    if name == "offs":
        return (torch.arange(count) + 1) * _grouped_rows(recorded) // count
    if name == "offsets":
        return torch.arange(count) * math.prod(recorded.shapes[1]) // count
    if name == "lengths":
        longest = recorded.shapes[0][1 if recorded.concrete[2] == "True" else 0]
        return longest - torch.arange(count) * (longest // 2) // count
    rows, states = recorded.shapes[0][0], recorded.shapes[2]
    batch = (states[0] if isinstance(states[0], list) else states)[1]
    others, left = max(count - 1, 1), rows - batch
    sizes = left // others + (torch.arange(count) <= left % others).long()
    sizes[0] = batch
    return sizes


def _grouped_rows(recorded: Recorded) -> int:
    """How many rows of the left matrix, columns of the right one, or products summed up in each
    element are divided into groups: a third dimension counts the groups."""
    left, right = recorded.shapes[:2]
    if len(left) == 3:
        return int(right[-1])
    return int(left[0] if len(right) == 3 else left[1])


def _limit(recorded: Recorded) -> int:
    """Whole numbers stay below it: indices must lie inside what they point into."""
    first = next((dims for dims in recorded.shapes if dims and isinstance(dims[0], int)), [2])
    if recorded.name.startswith("aten::embedding"):
        return max(1, int(first[0]))
    if recorded.name in _CLASSES:
        return max(1, int(first[1] if len(first) > 1 else first[0]))
    dim = next((text for text in recorded.concrete if text.lstrip("-").isdigit()), None)
    if dim is not None and -len(first) <= int(dim) < len(first):
        return max(1, int(first[int(dim)]))
    return max(1, min(127, *first) if len(first) > 1 else min(127, first[0]))


def _plain(argument: Any, text: str, device: torch.device) -> Any:
    kind = argument.real_type if hasattr(argument, "real_type") else argument.type
    real = str(kind).removeprefix("Optional[").removesuffix("]")
    try:
        if real == "ScalarType":
            return _NUMBERED[int(text)]
        if real == "MemoryFormat":
            return _FORMATS[int(text)]
        if real == "Layout":
            return torch.strided
        if real == "Device":
            return device
        if real == "str":
            return text
        return ast.literal_eval(text)
    except (KeyError, ValueError, SyntaxError):
        raise CannotRebuildError(f"its argument {argument.name} reads {text!r}") from None
