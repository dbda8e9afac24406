"""What a training script is made of, as its own process saw it: what it built, where, and how.

The fix room writes it (script.json) and reads it again to know which remedies fit, and where in
the source each one belongs. Only the standard library is needed here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Environment variables that decide whether a remedy fits.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A place in the user's own code."""

    file: str
    line: int
    function: str
    ends: tuple[int, int] | None = None  # line and column, in bytes, after the code that ran there

    @property
    def words(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Something that was constructed: an optimizer, a DataLoader, DDP, a GradScaler."""

    kind: str  # optimizer, loader, ddp, scaler
    type: str  # the class's name
    options: dict[str, Any]  # its arguments, defaults included; what JSON has no word for is a str
    given: tuple[str, ...]  # arguments that the caller named or gave
    frames: tuple[Frame, ...]  # the user's frames that led here, innermost first
    direct: bool = True  # the user's own code called the constructor, no library in between
    trains: bool = True  # a loader that fed no training step has False
    library: str = ""  # the package that called the constructor, if `direct` is False
    begun: int = 0  # how often a loader was begun: once per epoch
    iterable: bool = False  # a loader's dataset only yields: every worker would yield all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCall:
    """The first training call of a module that the script itself calls."""

    type: str  # of the module
    frames: tuple[Frame, ...]
    names: tuple[str, ...]  # what each frame calls it, such as model or self.model; "" if nothing
    images: tuple[str, ...] = ()  # floating arguments of four or five dimensions: 0, 1, pixels
    torchs_forward: str | None = None  # the path in it of a module whose forward is torch's own


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """A backward pass and the calls of roots that led to it, each place once."""

    forwards: tuple[tuple[Frame, ...], ...]
    backward: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """One rank's training. Frames are the user's own, innermost first."""

    device: str = "cpu"  # type of the device that the model is on
    built: tuple[Built, ...] = ()
    forward: tuple[Frame, ...] = ()  # of the first training forward
    backward: tuple[Frame, ...] = ()
    step: tuple[Frame, ...] = ()  # of optimizer.step
    zero_grad: tuple[Frame, ...] = ()  # of the first call that keeps the memory of gradients
    clip: tuple[Frame, ...] = ()  # of the first clipping of gradients
    passes: tuple[TrainingPass, ...] = ()  # those of different places
    root_calls: tuple[RootCall, ...] = ()
    set_threads: tuple[Frame, ...] = ()  # of the last call of torch.set_num_threads
    roots: tuple[str, ...] = ()  # types of the modules that the script itself calls to train
    modules: dict[str, int] = field(default_factory=dict)  # inside the roots, by type's name
    recurrent: tuple[
        tuple[str, int], ...
    ] = ()  # nn.RNN, GRU, LSTM of the roots: type, state's size
    blocks: tuple[str, int] | None = (
        None  # the type that repeats with the most parameters, and how often
    )
    block_root: str = ""  # type of the root that holds the blocks
    block_list: str = ""  # where in it they are, such as encoder.layers
    block_statistics: bool = False  # the blocks update running statistics
    checkpoint_switch: str | None = None  # the module with gradient_checkpointing_enable()
    checkpointed: bool = False  # blocks recompute their activations already
    sources: tuple[str, ...] = ()  # the user's files that define modules of the roots
    parameters: int = 0
    parameter_bytes: int = 0
    dtypes: tuple[str, ...] = ()
    buffers: int = 0  # tensors in the roots that are no parameters, such as running statistics
    image_inputs: bool = False  # a root gets floating tensors of four or five dimensions
    passes_per_step: int | None = None  # backward passes per optimizer's step; None if it varies
    synced_passes: int | None = None  # of those, in how many DDP exchanged gradients
    graph_changes: bool | None = None  # DDP saw other unused parameters; None if it did not look
    autocast: str | None = None  # the dtype, where the script has autocast on in its forward
    compiled: bool = False
    no_compiler: str | None = None  # why torch.compile cannot work on this machine
    bf16: bool | None = None  # the device has instructions for bf16 products; None: not known
    closure: bool = False  # the optimizer is given a function that computes the loss
    cudnn_benchmark: bool = False
    matmul_precision: str = "highest"  # mixed: set by torch's older and newer switches
    conv_tf32: bool = True
    deterministic: bool = False
    threads: int = 0
    cores: int = 0  # that this process can keep busy, quotas counted
    machine_cores: int = 0
    numa_nodes: int = 1  # whose cores this process may use
    local_ranks: int = 1  # of the job, on this machine
    onednn: bool | None = None  # whether it was on in the first forward; None: torch has none
    flushes_denormals: bool = False
    collects: bool = True  # garbage collections look at every object: none are frozen
    variables: dict[str, str] = field(default_factory=dict)  # VARIABLES, those that are set
    world_size: int = 1
    backend: str | None = None  # of the default process group

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ScriptFacts:
        """Names that this version does not know are left out."""
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        for name in ("forward", "backward", "step", "zero_grad", "clip", "set_threads"):
            known[name] = _frames(known.get(name, ()))
        known["passes"] = tuple(_pass(value) for value in known.get("passes", ()))
        known["root_calls"] = tuple(_root_call(value) for value in known.get("root_calls", ()))
        known["built"] = tuple(
            Built(**{**built, "frames": _frames(built["frames"]), "given": tuple(built["given"])})
            for built in known.get("built", ())
        )
        for name in ("roots", "dtypes", "sources"):
            known[name] = tuple(known.get(name, ()))
        known["recurrent"] = tuple((kind, size) for kind, size in known.get("recurrent", ()))
        if known.get("blocks") is not None:
            known["blocks"] = tuple(known["blocks"])
        return cls(**known)

    @property
    def convolves(self) -> bool:
        return any("conv" in name.lower() for name in self.modules)

    def of_kind(self, kind: str) -> list[Built]:
        return [built for built in self.built if built.kind == kind]


def _frames(values: Any) -> tuple[Frame, ...]:
    return tuple(_frame(**value) for value in values)


def _frame(*, ends: Any = None, **value: Any) -> Frame:
    return Frame(**value, ends=None if ends is None else (ends[0], ends[1]))


def _pass(value: Any) -> TrainingPass:
    forwards = tuple(_frames(frames) for frames in value["forwards"])
    return TrainingPass(forwards=forwards, backward=_frames(value["backward"]))


def _root_call(value: Any) -> RootCall:
    return RootCall(
        type=value["type"],
        frames=_frames(value["frames"]),
        names=tuple(value["names"]),
        images=tuple(value["images"]),
        torchs_forward=value.get("torchs_forward"),
    )
