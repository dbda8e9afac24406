"""Note what a training script is made of while it trains, without changing it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stepscope.fix.frames import called_by_user, calling_library, users_frames
from stepscope.fix.machine_facts import machine_facts
from stepscope.fix.model_facts import model_facts
from stepscope.fix.watch_passes import PassWatch
from stepscope.records.script_facts import Built, Frame, ScriptFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.building import Made
    from stepscope.fix.training_process import TrainingProcess

_PLAIN = (bool, int, float, str, type(None))
_MOST_BUILT = 50
_STEPS = 8  # optimizer steps whose backward passes are counted


class ScriptWatch:
    """Listens to everything that remedies may change."""

    def __init__(self, training: TrainingProcess) -> None:
        self._built: list[tuple[Built, Any]] = []
        self._forward: tuple[Frame, ...] = ()
        self._backward: tuple[Frame, ...] = ()
        self._step: tuple[Frame, ...] = ()
        self._zero_grad: tuple[Frame, ...] = ()
        self._set_threads: tuple[Frame, ...] = ()
        self._onednn: bool | None = None
        self._roots: list[Any] = []
        self._images = False
        self._autocast: str | None = None
        self._passes = self._synced = 0
        self._cycles: list[tuple[int, int]] = []  # passes and synchronised passes of each step
        self._fed: set[int] = set()  # loaders whose batch was the last before a backward pass
        self._last_loader: int | None = None
        self._where = PassWatch(training)
        self._begun: Counter[int] = Counter()  # how often each loader was
        for kind in ("optimizer", "loader", "ddp", "scaler"):
            training.after_building(kind, self._note_built)
        training.when_root(self._roots.append)
        training.around_root(self._forward_begins)
        training.before_backward(self._backward_begins)
        training.before_step(self._step_begins)
        training.when_imported("torch.optim.optimizer", self._watch_zero_grad)
        training.when_imported("torch", self._watch_threads)
        training.when_imported("torch.utils.data.dataloader", self._watch_fetches)

    def _note_built(self, made: Made) -> None:
        if len(self._built) >= _MOST_BUILT:
            return
        options = {
            name: _plain(value) for name, value in {**made.defaults, **made.arguments}.items()
        }
        built = Built(
            kind=made.kind,
            type=made.name,
            options=options,
            given=tuple(made.arguments),
            frames=users_frames(),
            direct=called_by_user(),
            library=calling_library(),
            iterable=made.kind == "loader" and _only_yields(made.object),
        )
        self._built.append((built, made.object))

    def _forward_begins(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._forward:
            return
        import torch

        self._forward = users_frames()
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        self._images = any(v.dim() in (4, 5) and v.is_floating_point() for v in tensors)
        if torch.backends.mkldnn.is_available():
            self._onednn = bool(torch.backends.mkldnn.enabled)
        kind = next((p.device.type for p in module.parameters()), "cpu")
        if torch.is_autocast_enabled(kind):
            self._autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    def _backward_begins(self, _outputs: Any) -> None:
        if len(self._cycles) >= _STEPS:
            return
        if not self._backward:
            self._backward = users_frames()
        self._passes += 1
        if self._last_loader is not None:
            self._fed.add(self._last_loader)
        wrapped = [made for built, made in self._built if built.kind == "ddp"]
        if all(getattr(ddp, "require_backward_grad_sync", True) for ddp in wrapped):
            self._synced += 1

    def _step_begins(self, _optimizer: Any) -> None:
        if len(self._cycles) >= _STEPS:
            return
        if not self._step:
            self._step = users_frames()
        self._cycles.append((self._passes, self._synced))
        self._passes = self._synced = 0

    def _watch_zero_grad(self, module: Any) -> None:
        torch_module: Any = sys.modules["torch"].nn.Module
        original = module.Optimizer.zero_grad

        def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
            if not set_to_none and not self._zero_grad:
                self._zero_grad = users_frames()
            original(optimizer, set_to_none)

        module.Optimizer.zero_grad = zero_grad
        original_of_module = torch_module.zero_grad

        def zero_grad_of_module(owner: Any, set_to_none: bool = True) -> None:
            if not set_to_none and not self._zero_grad:
                self._zero_grad = users_frames()
            original_of_module(owner, set_to_none)

        torch_module.zero_grad = zero_grad_of_module

    def _watch_threads(self, module: Any) -> None:
        original = module.set_num_threads

        def set_num_threads(number: int) -> None:
            self._set_threads = users_frames()
            original(number)

        module.set_num_threads = set_num_threads

    def _watch_fetches(self, module: Any) -> None:
        original = module.DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            self._last_loader = id(loader)
            self._begun[id(loader)] += 1
            return original(loader)

        module.DataLoader.__iter__ = iterate

    def facts(self) -> ScriptFacts:
        """As far as the training came."""
        import torch

        dist = sys.modules.get("torch.distributed")
        grouped = dist is not None and dist.is_available() and dist.is_initialized()
        built = tuple(self._with_use(built, made) for built, made in self._built)
        facts = ScriptFacts(
            built=built,
            forward=self._forward,
            backward=self._backward,
            step=self._step,
            zero_grad=self._zero_grad,
            set_threads=self._set_threads,
            onednn=self._onednn,
            roots=tuple(type(root).__name__ for root in self._roots),
            image_inputs=self._images,
            passes_per_step=_constant([passes for passes, _ in self._cycles]),
            synced_passes=_constant([synced for _, synced in self._cycles]),
            graph_changes=self._graph_changes(),
            autocast=self._autocast,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            matmul_precision=_matmul_precision(),
            conv_tf32=_conv_tf32(),
            deterministic=torch.are_deterministic_algorithms_enabled()
            or torch.backends.cudnn.deterministic,
            threads=torch.get_num_threads(),
            world_size=dist.get_world_size() if dist is not None and grouped else 1,
            backend=dist.get_backend() if dist is not None and grouped else None,
        )
        return replace(facts, **self._where.content, **model_facts(self._roots), **machine_facts())

    def _with_use(self, built: Built, made: Any) -> Built:
        """Whether a loader feeds the training, itself or through one that a library made of it."""
        if built.kind != "loader":
            return built
        users = [
            loader
            for other, loader in self._built
            if id(loader) in self._fed
            and (loader is made or (not other.direct and loader.dataset is made.dataset))
        ]
        begun = sum(self._begun[id(loader)] for loader in users)
        return replace(built, trains=bool(users), begun=begun)

    def _graph_changes(self) -> bool | None:
        """DDP compares the unused parameters of each step where it looks for them."""
        looking = [
            made
            for built, made in self._built
            if built.kind == "ddp" and built.options.get("find_unused_parameters")
        ]
        if not looking:
            return None
        return not all(
            ddp._get_ddp_logging_data().get("can_set_static_graph", True) for ddp in looking
        )


def _only_yields(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _constant(values: Sequence[int]) -> int | None:
    """The value, if it is the same after the first step."""
    steady = set(values[1:] or values)
    return steady.pop() if len(steady) == 1 else None


def _plain(value: Any) -> Any:
    """A value JSON has a word for, else its type's name in brackets."""
    if isinstance(value, _PLAIN):
        return value
    if (
        isinstance(value, (list, tuple))
        and len(value) <= 8
        and all(isinstance(v, _PLAIN) for v in value)
    ):
        return list(value)
    return f"<{type(value).__name__}>"


def _matmul_precision() -> str:
    """Torch refuses to say where a script uses its older and its newer switches together."""
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return "mixed"


def _conv_tf32() -> bool:
    import torch

    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return True  # torch's default
