"""Note what a training script is made of while it trains (models, passes, steps, machine),
without changing it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stepscope.fix.cores import machine_facts
from stepscope.fix.model_structure import (
    checkpoint_switch,
    find_blocks,
    is_compiled,
    torchs_forward,
)
from stepscope.records.script_facts import Built, Frame, RootCall, ScriptFacts, TrainingPass

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
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
        def watch(owner: Any) -> None:
            original = owner.zero_grad

            def zero_grad(self_: Any, set_to_none: bool = True) -> None:
                if not set_to_none and not self._zero_grad:
                    self._zero_grad = users_frames()
                original(self_, set_to_none)

            owner.zero_grad = zero_grad

        watch(module.Optimizer)
        watch(sys.modules["torch"].nn.Module)

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


# Note where a script calls its models, starts backward passes, clips gradients and steps.

_PASSES = 16  # that are looked at
_MOST_PLACES = 8
_IMAGE_DIMS = (4, 5)


class PassWatch:
    """Listens until enough passes were seen."""

    def __init__(self, training: TrainingProcess) -> None:
        self._calls: dict[int, RootCall] = {}  # of roots that are part of a pass
        self._waiting: dict[int, RootCall] = {}  # of roots whose backward pass is still to come
        self._forwards: dict[tuple[Frame, ...], None] = {}
        self._passes: dict[TrainingPass, None] = {}
        self._seen = 0
        self._clip: tuple[Frame, ...] = ()
        self.closure = False
        training.around_root(self._root_called)
        training.before_backward(self._backward_begins)
        training.before_clipping(self._clipping)
        training.before_step_call(self._step_called)

    @property
    def content(self) -> dict[str, Any]:
        """For ScriptFacts."""
        return {
            "passes": tuple(self._passes)[:_MOST_PLACES],
            "root_calls": tuple(self._calls.values()),
            "clip": self._clip,
            "closure": self.closure,
        }

    def _root_called(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._seen >= _PASSES:
            return
        frames = users_frames()
        if len(self._forwards) < _MOST_PLACES:
            self._forwards.setdefault(frames)
        if id(module) not in self._calls:
            self._waiting[id(module)] = RootCall(
                type=type(module).__name__,
                frames=frames,
                names=tuple(_name_of(module, frame) for frame in _frame_objects(len(frames))),
                images=tuple(_images(args, kwargs)),
                torchs_forward=torchs_forward(module),
            )

    def _backward_begins(self, _outputs: Any) -> None:
        if self._seen >= _PASSES:
            return
        self._seen += 1
        self._calls |= self._waiting
        self._waiting.clear()
        if self._forwards:
            forwards = tuple(self._forwards)
            self._passes.setdefault(TrainingPass(forwards=forwards, backward=users_frames()))
        self._forwards.clear()

    def _clipping(self) -> None:
        self._clip = self._clip or users_frames()

    def _step_called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.closure = self.closure or any(callable(v) for v in (*args, *kwargs.values()))


def _images(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    for name, value in (*enumerate(args), *kwargs.items()):
        if getattr(value, "ndim", 0) in _IMAGE_DIMS and _is_floating(value):
            yield str(name)


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _frame_objects(most: int) -> Iterator[FrameType]:
    """The frames that users_frames() names."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if is_users(frame.f_code.co_filename):
            most -= 1
            yield frame
        frame = frame.f_back


def _name_of(module: Any, frame: FrameType) -> str:
    """What a frame calls an object: a variable, or an attribute of its `self`."""
    for names in (frame.f_locals, frame.f_globals):
        for name, value in list(names.items()):
            if value is module:
                return name
    owner = frame.f_locals.get("self")
    held = getattr(owner, "__dict__", {})
    for names in (held, held.get("_modules") or {}):
        for name, value in list(names.items()):
            if value is module:
                return f"self.{name}"
    return ""


# What the modules that train are made of, and what their device can do.

_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")


def model_facts(roots: Sequence[Any]) -> dict[str, Any]:
    """For ScriptFacts."""
    parameters = {id(p): p for root in roots for p in root.parameters()}.values()
    modules = [module for root in roots for module in root.modules()]
    device = next((p.device.type for p in parameters), "cpu")
    return {
        "device": device,
        "modules": dict(Counter(type(module).__name__ for module in modules)),
        "recurrent": _recurrent(modules),
        **_block_facts(roots),
        "sources": _sources(modules),
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "buffers": len({id(b) for root in roots for b in root.buffers()}),
        "dtypes": tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "compiled": any(is_compiled(module) for module in modules)
        or (not roots and _has_compiled()),
        "no_compiler": _why_no_compiler(device),
        "bf16": _has_bf16(device),
    }


def _recurrent(modules: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    rnn_base = sys.modules["torch"].nn.RNNBase
    found = {id(module): module for module in modules if isinstance(module, rnn_base)}
    return tuple((type(module).__name__, int(module.hidden_size)) for module in found.values())


def _block_facts(roots: Sequence[Any]) -> dict[str, Any]:
    """Of the root with the most parameters in blocks: there is one as a rule."""
    for root in roots:
        blocks = find_blocks(root)
        if blocks is not None:
            return {
                "blocks": (blocks.type, len(blocks.modules)),
                "block_root": type(root).__name__,
                "block_list": blocks.path,
                "block_statistics": blocks.update_statistics,
                "checkpoint_switch": checkpoint_switch(root),
                "checkpointed": any(_is_checkpointed(module) for module in root.modules()),
            }
    return {}


def _is_checkpointed(module: Any) -> bool:
    return (
        type(module).__name__ == "CheckpointWrapper"
        or getattr(module, "gradient_checkpointing", False) is True
    )


def _sources(modules: Iterable[Any]) -> tuple[str, ...]:
    names = {type(module).__module__ for module in modules}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return tuple(sorted({os.path.abspath(file) for file in files if file and is_users(file)}))  # noqa: PTH100


def _has_compiled() -> bool:
    """The script compiles a function that calls its model."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and sum(dynamo.counters["frames"].values()) > 0


def _why_no_compiler(device: str) -> str | None:
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    named = (os.environ.get("CXX"), os.environ.get("CC"), *_COMPILERS)
    if not any(name and shutil.which(name) for name in named):
        return "torch.compile needs a C++ compiler, and none is installed"
    return None


def _has_bf16(device: str) -> bool | None:
    """Whether the device multiplies bf16 itself, rather than as fp32."""
    import torch

    try:
        if device == "cuda":
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        if device != "cpu":
            return None
        if torch.cpu._is_avx512_supported():  # there oneDNN says yes without bf16 instructions
            return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError, TypeError):
        return None


# Which lines of the user's own code led here.

_MOST = 12
_OURS = str(Path(__file__).parents[1])
_STDLIB = str(Path(sysconfig.get_paths()["stdlib"]))


def is_users(file: str) -> bool:
    """Not a library's, the interpreter's or ours."""
    return not (
        file.startswith((_OURS, _STDLIB, "<")) or "site-packages" in file or "dist-packages" in file
    )


def called_by_user() -> bool:
    """Whether the innermost frame that is not ours is the user's."""
    frame = _caller()
    return frame is not None and is_users(frame.f_code.co_filename)


def _caller() -> FrameType | None:
    """The innermost frame that is not ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def calling_library() -> str:
    """The package that called torch, if the user's own code did not: transformers, say."""
    frame = _caller()
    if frame is None or is_users(frame.f_code.co_filename):
        return ""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def users_frames() -> tuple[Frame, ...]:
    """The user's frames of this thread, innermost first."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _MOST:
        code = frame.f_code
        if is_users(code.co_filename):
            file = str(Path(code.co_filename).absolute())
            found.append(
                Frame(file=file, line=frame.f_lineno, function=code.co_qualname, ends=_ends(frame))
            )
        frame = frame.f_back
    return tuple(found)


def _ends(frame: FrameType) -> tuple[int, int] | None:
    """Where the expression that runs ends; not known if Python runs without columns."""
    instruction = frame.f_lasti // 2
    positions = next(islice(frame.f_code.co_positions(), instruction, None), None)
    if positions is None or positions[1] is None or positions[3] is None:
        return None
    return positions[1], positions[3]
