"""What is known about aten operators (which are heavy, random or write to their arguments),
and how long they take on a device.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Work that grows faster than the bytes it reads: not repeated unless asked.
_HEAVY = re.compile(
    r"(?:^|_|add|b)mm(?:_activation)?$|^(?:add)?mv$|^v?dot$|matmul|conv|attention|rnn|lstm_layer|gru|linalg|fft"
    r"|sort|topk|cdist|gemm|inverse|cholesky|svd|(?:^|_)eig|grid_sample|ctc_loss"
)
# Of these, what may be repeated where that is asked for.
_PRODUCT = re.compile(r"^(?:add|b|baddb)?mm$|^(?:add)?mv$|conv(?!.*backward)")
# Results may differ from call to call on a GPU, or hold what was in memory before.
_NOT_REPEATABLE = re.compile(
    r"scatter|index_add|index_put|index_copy|^put|bincount|histc|kthvalue|^_?n?median|cumsum|cumprod"
    r"|^(?:new_)?empty|^resize|^set$|_local_scalar_dense|^nonzero|unique|masked_select"
)
# These update running statistics, which their schema does not say.
BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_RUNNING_STATISTICS = (3, 4)
TRAINING_PLACE = 5


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """One overload; `written` are the positions of arguments that it changes."""

    name: str
    written: tuple[int, ...]
    refusal: str | None  # why it is never repeated; None where it may be
    is_product: bool = False  # heavy, but it may be repeated where that is asked for


@functools.cache
def facts(operator: Any) -> OperatorFacts:
    """Read an operator's schema and name."""
    arguments = operator._schema.arguments
    written = tuple(
        place
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    refusal = _refusal(operator, written)
    is_product = refusal == "heavy" and bool(_PRODUCT.search(_plain(operator))) and not written
    return OperatorFacts(str(operator), written, refusal, is_product)


def _plain(operator: Any) -> str:
    return str(operator._schema.name.partition("::")[2].rstrip("_"))


def _refusal(operator: Any, written: tuple[int, ...]) -> str | None:
    plain = _plain(operator)
    if operator.namespace != "aten":
        return "not an operator of torch"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return "random"
    if _HEAVY.search(plain):
        return "heavy"
    if _NOT_REPEATABLE.search(plain) or written not in ((), (0,)):
        return "not repeatable"
    return None


@functools.cache
def plain_name(operator: Any) -> str:
    """`relu_` of aten.relu_.default."""
    return str(operator._schema.name.partition("::")[2])


def written_tensors(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call changes, running statistics too."""
    places = facts(operator).written
    if plain_name(operator) in BATCH_NORMS and args[TRAINING_PLACE]:
        places = _RUNNING_STATISTICS
    if not places:
        return []
    names = operator._schema.arguments
    values = [
        args[place] if place < len(args) else kwargs.get(names[place].name) for place in places
    ]
    return list(tensors_in(values))


def repeatable_arguments(operator: Any, args: Any) -> Any:
    """A repeated batch norm must not update the running statistics again."""
    if plain_name(operator) in BATCH_NORMS and args[TRAINING_PLACE]:
        before, after = args[: _RUNNING_STATISTICS[0]], args[TRAINING_PLACE:]
        return (*before, None, None, *after)
    return args


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def is_plain(tensor: torch.Tensor) -> bool:
    """A dense tensor of torch itself: its storage is all there is."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def new_storages(
    given: list[torch.Tensor], made: list[torch.Tensor], written: list[torch.Tensor]
) -> list[torch.Tensor]:
    """One tensor for each storage that a call changed or allocated; views are left out."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    fresh = {tensor.untyped_storage()._cdata: tensor for tensor in written}
    for tensor in made:
        address = tensor.untyped_storage()._cdata
        if address not in known:
            fresh.setdefault(address, tensor)
    return list(fresh.values())


# Times what runs on a device: on a GPU by events that are read later, else by the clock.

# The GPU is kept busy for a quarter of a millisecond while the host prepares what is timed.
_BUSY_CYCLES = 500_000


class OperatorClock:
    """`took_ns` has one entry for each pair of `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._took_ns: list[int] = []
        self._cuda = device.type == "cuda"
        self._began: Any = None

    def start(self) -> None:
        if self._cuda:
            torch.cuda._sleep(_BUSY_CYCLES)
        self._began = self._event() if self._cuda else time.perf_counter_ns()

    def stop(self) -> None:
        if self._cuda:
            self._events.append((self._began, self._event()))
        else:
            self._took_ns.append(time.perf_counter_ns() - self._began)

    def took_ns(self) -> list[int]:
        if self._cuda:
            torch.cuda.synchronize()
            return [round(began.elapsed_time(ended) * 1e6) for began, ended in self._events]
        return self._took_ns

    def _event(self) -> Any:
        make: Callable[..., Any] = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event


# Whether a CUDA graph is being captured: what runs then is repeated as it is, without Python.


def is_capturing() -> bool:
    """Nothing may wait for the device then, nor depend on what a tensor holds."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
