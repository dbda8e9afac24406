"""What a training script is made of, as its own process saw it: what it built, where, and how.

The fix room writes it (script.json) and reads it again to know which remedies fit, and where in
the source each one belongs. Only the standard library is needed here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """One rank's training. Frames are the user's own, innermost first."""

    device: str = "cpu"  # type of the device that the model is on
    built: tuple[Built, ...] = ()
    forward: tuple[Frame, ...] = ()  # of the first training forward
    backward: tuple[Frame, ...] = ()
    step: tuple[Frame, ...] = ()  # of optimizer.step
    zero_grad: tuple[Frame, ...] = ()  # of the first call that keeps the memory of gradients
    roots: tuple[str, ...] = ()  # types of the modules that the script itself calls to train
    modules: dict[str, int] = field(default_factory=dict)  # inside the roots, by type's name
    blocks: tuple[str, int] | None = (
        None  # the type that repeats with the most parameters, and how often
    )
    parameters: int = 0
    parameter_bytes: int = 0
    dtypes: tuple[str, ...] = ()
    image_inputs: bool = False  # a root gets floating tensors of four dimensions
    passes_per_step: int | None = None  # backward passes per optimizer's step; None if it varies
    synced_passes: int | None = None  # of those, in how many DDP exchanged gradients
    autocast: str | None = None  # the dtype, where the script has autocast on in its forward
    compiled: bool = False
    cudnn_benchmark: bool = False
    matmul_precision: str = "highest"
    conv_tf32: bool = True
    deterministic: bool = False
    threads: int = 0
    cores: int = 0
    world_size: int = 1
    backend: str | None = None  # of the default process group

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ScriptFacts:
        """Names that this version does not know are left out."""
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        for name in ("forward", "backward", "step", "zero_grad"):
            known[name] = _frames(known.get(name, ()))
        known["built"] = tuple(
            Built(**{**built, "frames": _frames(built["frames"]), "given": tuple(built["given"])})
            for built in known.get("built", ())
        )
        for name in ("roots", "dtypes"):
            known[name] = tuple(known.get(name, ()))
        if known.get("blocks") is not None:
            known["blocks"] = tuple(known["blocks"])
        return cls(**known)

    def of_kind(self, kind: str) -> list[Built]:
        return [built for built in self.built if built.kind == kind]


def _frames(values: Any) -> tuple[Frame, ...]:
    return tuple(_frame(**value) for value in values)


def _frame(*, ends: Any = None, **value: Any) -> Frame:
    return Frame(**value, ends=None if ends is None else (ends[0], ends[1]))
