"""Which storages hold the model, its gradients, the optimizer's state and prepared batches;
bytes once per storage. Only reads.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from stepscope.measure.steps.optimizers import trained_parameters

# Everything here only reads: no tensor is created, copied or kept alive.

KNOWN = ("parameters", "gradients", "optimizer", "buffers")
Key: TypeAlias = tuple[str, int]  # device, address
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_COMPRESSED = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}
_DEPTH = 4  # of containers in an optimizer's state


class TensorStorage(NamedTuple):
    key: Key
    size_bytes: int
    storage: Any


def pieces(tensor: Any, notes: set[str]) -> Iterator[TensorStorage]:
    """The storages of a tensor: one, or several for sparse tensors and subclasses."""
    try:
        with torch.no_grad():
            storages = [_piece(plain) for plain in _plain(tensor, notes)]
    except Exception as error:
        notes.add(f"a {_kind(tensor)} could not be read ({type(error).__name__}): not counted")
        return
    for piece in storages:
        if piece.key[0].startswith("meta"):
            notes.add("tensors on the meta device hold no memory: not counted")
        elif piece.size_bytes:
            yield piece


def _piece(tensor: Any) -> TensorStorage:
    storage = tensor.untyped_storage()
    device = str(tensor.device)
    if device.startswith("meta"):
        return TensorStorage((device, 0), 0, storage)
    # Asking a lazily cloned tensor for its address would make it copy itself.
    lazy = getattr(torch._C, "_is_cow_tensor", None)
    address = -storage._cdata if lazy is not None and lazy(tensor) else storage.data_ptr()
    return TensorStorage((device, address), storage.nbytes(), storage)


def _plain(tensor: Any, notes: set[str]) -> Iterator[Any]:
    """The strided tensors inside; a sharded tensor gives its local shard."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        kind = _kind(tensor)
        if kind == "DTensor":
            notes.add("sharded (DTensor) tensors: this rank's local shard is counted")
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in filter(is_tensor, parts):  # newer DTensors list their mesh as well
            yield from _plain(part, notes)
    elif tensor.layout == torch.sparse_coo:
        notes.add("sparse tensors: indices and values are counted")
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in _COMPRESSED:
        yield from (getattr(tensor, name)() for name in (*_COMPRESSED[tensor.layout], "values"))
    else:
        yield tensor


def _kind(tensor: Any) -> str:
    return type(tensor).__name__


def is_tensor(value: Any) -> bool:
    """By type alone: asking a proxy for its class may run the script's code."""
    return issubclass(type(value), torch.Tensor)


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Tensors in nested dicts, lists and tuples."""
    if is_tensor(value):
        yield value
    elif depth and issubclass(type(value), dict):
        for inner in list(value.values()):
            yield from tensors_in(inner, depth - 1)
    elif depth and issubclass(type(value), (list, tuple)):
        for inner in list(value):
            yield from tensors_in(inner, depth - 1)


def find_root_modules(parameters: Iterable[Any]) -> list[Any]:
    """The outermost modules that hold any of these parameters, found among all living objects."""
    wanted = {id(parameter) for parameter in parameters}
    living = gc.get_objects()
    kinds = {kind for kind in set(map(type, living)) if issubclass(kind, torch.nn.Module)}
    modules = [item for item in living if type(item) in kinds]
    del living
    inner = {id(child) for module in modules for child in _children(module).values()}
    tops = [module for module in modules if id(module) not in inner]
    return [top for top in tops if any(id(p) in wanted for p in top.parameters())]


def _children(module: Any) -> dict[str, Any]:
    """Without calling the module, which may be half built."""
    children: Any = module.__dict__.get("_modules")
    return dict(children.items()) if children is not None else {}


@dataclass(slots=True)
class Held:
    """Bytes by category and storage at one moment; a storage is in one category only."""

    storages: dict[str, dict[Key, int]] = field(
        default_factory=lambda: {category: {} for category in KNOWN}
    )
    roots: int = 0

    def owner(self) -> dict[Key, str]:
        """The category of every storage."""
        return {key: name for name, keys in self.storages.items() for key in keys}

    def total(self, category: str, kind: str) -> int:
        return sum(size for key, size in self.storages[category].items() if on(key, kind))


def kind_of(key: Key) -> str:
    """The kind of device that a storage is on, such as cuda."""
    return key[0].partition(":")[0]


def on(key: Key, kind: str) -> bool:
    return kind_of(key) == kind


def bytes_by_kind(*storages: Mapping[Key, int]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for held in storages:
        for key, size in held.items():
            sizes[kind_of(key)] += size
    return sizes


class Model:
    """The modules that train, and the optimizers that train them."""

    def __init__(self, optimizers: Sequence[Any], notes: set[str]) -> None:
        self.optimizers = list(optimizers)
        self.roots: list[Any] = []
        self.leaves: set[int] = set()  # ids of tensors that the graph accumulates gradients into
        self._notes = notes
        self._rooted: set[int] = set()
        self._modules: dict[int, Any] = {}
        # FSDP swaps parameters in and out of modules: once a parameter, always one.
        self._parameters: dict[int, weakref.ref[Any]] = {}
        if len(self.optimizers) > 1:
            notes.add(f"{len(self.optimizers)} optimizers: counted together")

    def find_roots(self) -> None:
        """Add the modules that own what the optimizers update."""
        for root in find_root_modules(trained_parameters(self.optimizers)):
            self.add_root(root)

    def add_root(self, root: Any) -> None:
        """A module inside no other known module."""
        if id(root) in self._rooted or id(root) in self._modules:
            return
        self._rooted.add(id(root))
        self.roots.append(root)
        for module in root.modules():
            self._modules[id(module)] = module

    def forget(self) -> None:
        """Let go of everything that belongs to the script."""
        for held in (self.optimizers, self.roots, self._modules, self._parameters):
            held.clear()

    def names(self) -> dict[int, str]:
        """Qualified names by module id, without what wrappers add."""
        several = sum(any(True for _ in root.parameters()) for root in self.roots) > 1
        names: dict[int, str] = {}
        for root in self.roots:
            kind = type(_unwrapped(root)).__name__
            bare = not any(True for _ in root.parameters())
            for name, module in root.named_modules():
                parts = [part for part in name.split(".") if part not in _WRAPPERS]
                if parts and parts[0] == "module" and "Parallel" in type(root).__name__:
                    parts = parts[1:]
                clean = ".".join(parts)
                label = f"{kind}.{clean}" if clean and several else clean
                names.setdefault(id(module), label if label and not bare else kind)
        return names

    def outline(self) -> list[tuple[int, list[Any]]]:
        """Every module's id with its name, its type, the elements of its parameters, and whether
        it can recompute itself (a layer that transformers checkpoints)."""
        return [
            (ident, [name, type(module).__name__, _elements(module), _recomputes(module)])
            for ident, name in self.names().items()
            if (module := self._modules.get(ident)) is not None
        ]

    def kind(self) -> str:
        """Where most of the parameters are; if none are known, where torch holds anything."""
        sizes = bytes_by_kind(self.held().storages["parameters"])
        elsewhere = (
            "cuda" if bool(torch.cuda.is_initialized() and torch.cuda.memory_allocated()) else "cpu"
        )
        return max(sizes, key=lambda kind: sizes[kind], default=elsewhere)

    def devices(self, kind: str) -> list[int]:
        """The devices of that kind that hold parameters; if none are known, the current one."""
        held = self.held().storages["parameters"]
        if not held and kind == "cuda":
            return [torch.cuda.current_device()]
        return sorted({int(key[0].partition(":")[2] or 0) for key in held if on(key, kind)})

    def held(self) -> Held:
        """What is held now. Tied weights and views count once, in the first category."""
        own = self._own_parameters()
        inside = {id(parameter) for parameter in own}
        loose = [item for item in trained_parameters(self.optimizers) if id(item) not in inside]
        copies = [item for item in loose if own and id(item) not in self.leaves]
        if copies:
            self._notes.add(
                "the optimizer updates tensors that no running module holds (master copies): "
                "they count as optimizer state"
            )
        copied = {id(item) for item in copies}
        parameters = own + [item for item in loose if id(item) not in copied]
        states = [t for optimizer in self.optimizers for t in tensors_in(_state(optimizer))]
        held = Held(roots=len(self.roots))
        seen: set[Key] = set()
        for category, tensors in (
            ("parameters", parameters),
            ("gradients", self._gradients(parameters + copies)),
            ("optimizer", copies + states),
            ("buffers", self._buffers()),
        ):
            for tensor in tensors:
                for piece in pieces(tensor, self._notes):
                    if piece.key not in seen:
                        seen.add(piece.key)
                        held.storages[category][piece.key] = piece.size_bytes
        return held

    def remarks(self) -> None:
        """Note what readers of the figures should know."""
        own, grouped = self._own_parameters(), trained_parameters(self.optimizers)
        if not own and not grouped:
            self._notes.add("no module or optimizer was seen: their memory counts as other")
        stepped = {id(parameter) for parameter in grouped}
        free = [parameter for parameter in own if id(parameter) not in stepped]
        if free:
            self._notes.add(f"{len(free)} parameters are in no optimizer; they count as parameters")
        without = sum(1 for parameter in grouped if _gradient(parameter) is None)
        if without:
            self._notes.add(f"{without} parameters have no gradient after the step")

    def _own_parameters(self) -> list[Any]:
        for module in self._modules.values():
            for parameter in (getattr(module, "_parameters", None) or {}).values():
                if parameter is not None and id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = weakref.ref(parameter)
        alive = [reference() for reference in self._parameters.values()]
        return [parameter for parameter in alive if parameter is not None]

    def _buffers(self) -> list[Any]:
        return [
            buffer
            for module in self._modules.values()
            for buffer in (getattr(module, "_buffers", None) or {}).values()
            if buffer is not None
        ]

    def _gradients(self, parameters: list[Any]) -> list[Any]:
        own = [_gradient(parameter) for parameter in parameters]
        main = [getattr(parameter, "main_grad", None) for parameter in parameters]  # Megatron's
        return [gradient for gradient in own + main if is_tensor(gradient)]


def _elements(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _recomputes(module: Any) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _gradient(parameter: Any) -> Any:
    """None for a tensor that is not a leaf: reading its gradient would warn."""
    return parameter.grad if parameter.is_leaf else None


def _state(optimizer: Any) -> Any:
    state: Any = getattr(optimizer, "state", None)
    return dict(state) if hasattr(state, "keys") else {}


def _unwrapped(root: Any) -> Any:
    children = _children(root)
    inner = children.get("_orig_mod")
    if inner is None and "Parallel" in type(root).__name__:
        inner = children.get("module")
    return root if inner is None else _unwrapped(inner)


# Batches that the script holds besides the one it trains on: a list of them, or prefetched ones.
#
# They grow with the batch, as the one that the step reads. Only reads; nothing is kept alive.

Form = tuple[tuple[int, ...], torch.dtype]


def form_of(tensor: Any) -> Form:
    """What batches have in common."""
    return tuple(tensor.shape), tensor.dtype


def batch_bytes(
    given: Sequence[tuple[Key, int]], forms: Collection[Form], kind: str
) -> dict[str, int | None]:
    """What the step was given, and what else lives in one of its forms, on this kind of device."""
    mine = [(key, size) for key, size in given if on(key, kind)]
    return {
        "inputs_bytes": sum(size for _, size in mine),
        "prepared_bytes": _other_bytes(forms, {key for key, _ in mine}, kind),
    }


def _other_bytes(forms: Collection[Form], counted: set[Key], kind: str) -> int:
    size = 0
    for tensor in [item for item in gc.get_objects() if type(item) is torch.Tensor]:
        if tensor.requires_grad or tensor.device.type != kind or form_of(tensor) not in forms:
            continue
        for piece in pieces(tensor, set()):
            if piece.key not in counted:
                counted.add(piece.key)
                size += piece.size_bytes
    return size
