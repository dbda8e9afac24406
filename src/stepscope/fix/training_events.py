"""Call back when a training builds an object, calls a root module, runs backward, clips
gradients or steps.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    Before = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

# The modules that a script itself calls to train.
#
# During the first backward passes every call of a module is looked at. From then on only the calls
# of the roots are: the others cost nothing.

_PASSES = 4  # a step of several models has as many


class Roots:
    """Attaches to torch only where somebody listens."""

    def __init__(self, surrounds: Callable[[Any], Any], passes: PassEvents) -> None:
        self._surrounds, self._passes = surrounds, passes
        self._found_actions: list[Callable[[Any], None]] = []
        self._before: list[Before] = []
        self._roots: WeakSet[Any] = WeakSet()
        self._classes: set[type] = set()
        self._looking = False
        self._over = False
        self._left = _PASSES
        self._depth = 0

    @property
    def is_running(self) -> bool:
        """Whether a root's forward is under way."""
        return self._depth > 0

    def when_found(self, act: Callable[[Any], None]) -> None:
        self._look()
        self._found_actions.append(act)

    def before_call(self, before: Before | None) -> None:
        self._look()
        if before is not None:
            self._before.append(before)

    def _look(self) -> None:
        """Look at every module's call until a few backward passes are over."""
        if self._looking or self._over:
            return
        self._looking = True
        import torch

        module = torch.nn.Module
        self._plain = original = module.__call__
        is_grad_enabled = torch.is_grad_enabled

        @self._surrounds
        @functools.wraps(original)
        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not is_grad_enabled() or not _has_parameters(self_):
                return original(self_, *args, **kwargs)
            self._meet(self_)
            args, kwargs = self._prepare(self_, args, kwargs)
            self._depth += 1
            try:
                return original(self_, *args, **kwargs)
            finally:
                self._depth -= 1

        module.__call__ = call
        _know_as_unpatched(original, call)
        self._passes.after(self._pass_ended)

    def _pass_ended(self) -> None:
        self._left -= 1
        if self._looking and self._left <= 0:
            import torch

            self._looking, self._over = False, True
            looking = torch.nn.Module.__call__
            torch.nn.Module.__call__ = self._plain
            _know_as_unpatched(looking, self._plain)
            for root in self._roots:
                self._watch_class(type(root))

    def _meet(self, module: Any) -> None:
        if module in self._roots:
            return
        self._roots.add(module)
        for act in self._found_actions:
            act(module)

    def _prepare(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for before in self._before:
            changed = before(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def _watch_class(self, owner: Any) -> None:
        """The roots' own class calls `before`; what it calls inside is not looked at."""
        if owner in self._classes or not self._before:
            return
        self._classes.add(owner)
        original = owner.__call__

        import torch

        is_grad_enabled = torch.is_grad_enabled

        @self._surrounds
        @functools.wraps(original)
        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or self_ not in self._roots or not is_grad_enabled():
                return original(self_, *args, **kwargs)
            args, kwargs = self._prepare(self_, args, kwargs)
            self._depth += 1
            try:
                return original(self_, *args, **kwargs)
            finally:
                self._depth -= 1

        owner.__call__ = call


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _know_as_unpatched(original: Any, replacement: Any) -> None:
    """torch.compile goes straight to a module's forward as long as its call is the one that it
    found when it was imported."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module: Any = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is original:
            module.unpatched_nn_module_call = replacement


# Backward passes and optimizer steps, as they begin and end.


class PassEvents:
    """Attaches to torch only where somebody listens."""

    def __init__(self, surrounds: Callable[[Any], Any]) -> None:
        self._surrounds = surrounds
        self._before: list[Callable[[Any], Any]] = []
        self._after: list[Callable[[], None]] = []
        self._before_graph_is_freed: list[Callable[[Any], None]] = []
        self._attached = False
        self._depth = 0

    def before(self, act: Callable[[Any], Any]) -> None:
        self._attach()
        self._before.append(act)

    def after(self, act: Callable[[], None]) -> None:
        self._attach()
        self._after.append(act)

    def before_graph_is_freed(self, act: Callable[[Any], None]) -> None:
        """Before torch.autograd.grad, if it lets the graph go."""
        self._attach()
        self._before_graph_is_freed.append(act)

    def before_step(self, act: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_untraced(lambda optimizer, _args, _kw: act(optimizer)))

    def before_step_call(self, act: Callable[[Sequence[Any], dict[str, Any]], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(
            _untraced(lambda _optimizer, args, kwargs: act(args[1:], kwargs))
        )

    def after_step(self, act: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_untraced(lambda optimizer, _args, _kw: act(optimizer)))

    def _attach(self) -> None:
        if self._attached:
            return
        self._attached = True
        import torch.autograd.graph
        from torch._guards import TracingContext

        original = torch.autograd.graph._engine_run_backward

        @self._surrounds
        @functools.wraps(original)
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or TracingContext.try_get():
                return original(outputs, *args, **kwargs)
            if not kwargs.get("accumulate_grad"):
                if _frees_graph(args):
                    for act in self._before_graph_is_freed:
                        act(outputs)
                return original(outputs, *args, **kwargs)
            self._depth += 1
            try:
                for begin in self._before:
                    changed = begin(outputs)
                    outputs = outputs if changed is None else changed
                return original(outputs, *args, **kwargs)
            finally:
                self._depth -= 1
                for end in self._after:
                    end()

        torch.autograd._engine_run_backward = run_backward
        torch.autograd.graph._engine_run_backward = run_backward


def _frees_graph(args: Sequence[Any]) -> bool:
    """By what follows the outputs: their gradients, retain_graph, create_graph."""
    return len(args) > 2 and not (args[1] or args[2])


def _untraced(hook: Any) -> Any:
    """torch.compile traces an empty function instead, where it compiles the optimizer's step."""
    hook._torchdynamo_inline = _nothing
    return hook


def _nothing(*_args: Any) -> None:
    return None


# Optimizers, DataLoaders, DDP and GradScalers at the moment they are built.
#
# The constructors of torch's own classes are replaced once. A subclass that calls torch's
# constructor is met there; of several constructors that call each other only the first one counts.

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


# Calls of torch's functions that clip gradients.

_NAMES = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


class Clipping:
    """Attaches to torch only where somebody listens."""

    def __init__(
        self,
        when_imported: Callable[[str, Callable[[Any], None]], None],
        surrounds: Callable[[Any], Any],
    ) -> None:
        self._when_imported, self._surrounds = when_imported, surrounds
        self._before: list[Callable[[], None]] = []

    def before(self, act: Callable[[], None]) -> None:
        if not self._before:
            for module in ("torch.nn.utils.clip_grad", "torch.nn.utils"):
                self._when_imported(module, self._attach)
        self._before.append(act)

    def _attach(self, module: Any) -> None:
        for name in _NAMES:
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "_stepscope"):
                setattr(module, name, self._announced(original))

    def _announced(self, original: Any) -> Any:
        @self._surrounds
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            for act in self._before:
                act()
            return original(*args, **kwargs)

        clip._stepscope = True
        return clip
