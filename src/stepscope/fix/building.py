"""Optimizers, DataLoaders, DDP and GradScalers at the moment they are built.

The constructors of torch's own classes are replaced once. A subclass that calls torch's constructor
is met there; of several constructors that call each other only the first one counts.
"""

from __future__ import annotations

import functools
import inspect
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Kind -> where torch's classes of that kind are.
KINDS = {
    "optimizer": ("torch.optim", ()),  # every subclass of Optimizer in there
    "loader": ("torch.utils.data.dataloader", ("DataLoader",)),
    "ddp": ("torch.nn.parallel.distributed", ("DistributedDataParallel",)),
    "scaler": ("torch.amp.grad_scaler", ("GradScaler",)),
}


@dataclass(slots=True)
class Made:
    """A constructor's call: `arguments` by name, without defaults that the caller left out."""

    kind: str
    object: Any
    arguments: dict[str, Any]
    defaults: dict[str, Any]  # of all parameters that have one

    @property
    def name(self) -> str:
        return type(self.object).__name__

    def value(self, argument: str) -> Any:
        """As the constructor will see it."""
        return self.arguments.get(argument, self.defaults.get(argument))

    def takes(self, argument: str) -> bool:
        return argument in self.defaults or argument in self.arguments


class Builders:
    """All constructors that are watched."""

    def __init__(
        self,
        when_imported: Callable[[str, Callable[[Any], None]], None],
        surrounds: Callable[[Any], Any],
    ) -> None:
        self._when_imported, self._surrounds = when_imported, surrounds
        self._before: dict[str, list[Callable[[Made], None]]] = {}
        self._after: dict[str, list[Callable[[Made], None]]] = {}
        self._building = threading.local()

    def before(self, kind: str, change: Callable[[Made], None]) -> None:
        self._watch(kind)
        self._before[kind].append(change)

    def after(self, kind: str, act: Callable[[Made], None]) -> None:
        self._watch(kind)
        self._after[kind].append(act)

    def _watch(self, kind: str) -> None:
        if kind in self._before:
            return
        self._before[kind], self._after[kind] = [], []
        module, names = KINDS[kind]

        def attach(loaded: Any) -> None:
            for owner in _classes(loaded, names):
                self._replace(owner, kind)

        self._when_imported(module, attach)

    def _replace(self, owner: Any, kind: str) -> None:
        original = owner.__init__
        signature = inspect.signature(original)
        defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

        @self._surrounds
        @functools.wraps(original)
        def build(self_: Any, *args: Any, **kwargs: Any) -> None:
            inside: set[int] = self._building.__dict__.setdefault("ids", set())
            if id(self_) in inside:
                original(self_, *args, **kwargs)
                return
            inside.add(id(self_))
            try:
                try:
                    bound = signature.bind(self_, *args, **kwargs)
                except TypeError:  # the script's own mistake: let torch say so
                    original(self_, *args, **kwargs)
                    return
                first, arguments = _split(bound, signature)
                made = Made(kind, self_, arguments, defaults)
                for change in self._before[kind]:
                    change(made)
                original(*first, **made.arguments)
                for act in self._after[kind]:
                    act(made)
            finally:
                inside.discard(id(self_))

        owner.__init__ = build


def _split(bound: Any, signature: Any) -> tuple[list[Any], dict[str, Any]]:
    """What must stay positional (self, *args), and everything else by name."""
    first: list[Any] = []
    named: dict[str, Any] = {}
    for number, (name, value) in enumerate(bound.arguments.items()):
        kind = signature.parameters[name].kind
        if number == 0 or kind is inspect.Parameter.POSITIONAL_ONLY:
            first.append(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            first += value
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return first, named


def _classes(module: Any, names: tuple[str, ...]) -> Iterator[Any]:
    if names:
        yield from (getattr(module, name) for name in names if hasattr(module, name))
        return
    base = module.Optimizer
    for value in {id(value): value for value in vars(module).values()}.values():
        is_optimizer = isinstance(value, type) and issubclass(value, base) and value is not base
        if is_optimizer and "__init__" in vars(value):
            yield value
