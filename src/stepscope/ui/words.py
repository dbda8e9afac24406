"""One vocabulary for every surface: the parts of a step, and names from outside made printable."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from stepscope.records.step_parts import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.applied_remedy import RunOrigin
    from stepscope.records.explanation import Explanation
    from stepscope.records.whole_run import StallCause

# cause of a stall -> (label, what it means)
STALLS: dict[StallCause, tuple[str, str]] = {
    "data": (STEP_PARTS["stall_data"].label, "The data loader had no batch ready."),
    "evaluation": (
        STEP_PARTS["stall_evaluation"].label,
        "The model was evaluated between two training steps.",
    ),
    "checkpoint": (
        STEP_PARTS["stall_checkpoint"].label,
        "A checkpoint was saved between two training steps.",
    ),
    "gc": (STEP_PARTS["stall_gc"].label, "Python's garbage collector ran."),
    "compile": (STEP_PARTS["stall_compile"].label, "torch.compile compiled or recompiled."),
    "allocator": (
        STEP_PARTS["stall_allocator"].label,
        "The device's allocator ran out of memory and tried again.",
    ),
    "collective": (
        STEP_PARTS["stall_collective"].label,
        "This rank waited for another one in a collective.",
    ),
    "operating_system": (
        STEP_PARTS["stall_operating_system"].label,
        "No CPU core was free, or pages came from disk.",
    ),
    "logging": (
        STEP_PARTS["stall_logging"].label,
        "Python between two steps: logging, printing, .item().",
    ),
    "unknown": (STEP_PARTS["stall_unknown"].label, "No cause was measured in these steps."),
    "collecting": (
        STEP_PARTS["stall_collecting"].label,
        "The model collected experience between two training steps.",
    ),
    "generating": (
        STEP_PARTS["stall_generating"].label,
        "The model generated samples between two training steps.",
    ),
    "without_gradients": (
        STEP_PARTS["stall_without_gradients"].label,
        "Passes without gradients ran between two training steps.",
    ),
}
# id of a part -> (label, whether the device is idle then, what it means)
PARTS = {
    "compute": (
        STEP_PARTS["compute"].label,
        False,
        "Kernels run (on a CPU: operators).",
    ),
    "exposed_comm": (
        STEP_PARTS["exposed_comm"].label,
        False,
        "Communication that does not overlap with compute.",
    ),
    "exposed_memory": (
        STEP_PARTS["exposed_memory"].label,
        False,
        "Copies and memsets while nothing else runs.",
    ),
    "data_loading": (
        STEP_PARTS["data_loading"].label,
        True,
        "The device is idle while the CPU waits for the next batch.",
    ),
    "sync": (
        STEP_PARTS["sync"].label,
        True,
        "The device is idle after a call that made the CPU wait for it.",
    ),
    "operators": (
        STEP_PARTS["operators"].label,
        True,
        "The device is idle while the CPU is inside PyTorch operators.",
    ),
    "python": (
        STEP_PARTS["python"].label,
        True,
        "The device is idle while Python runs between PyTorch operators.",
    ),
    "profiler": (
        STEP_PARTS["profiler"].label,
        True,
        "The device waits for the profiler itself; absent without it.",
    ),
    "idle_launch": (
        STEP_PARTS["idle_launch"].label,
        True,
        "Launched work is on its way to the device.",
    ),
    "idle_other": (
        STEP_PARTS["idle_other"].label,
        True,
        "The device is idle with work queued, or for an unknown reason.",
    ),
    **{f"stall_{cause}": (label, False, hint) for cause, (label, hint) in STALLS.items()},
}
# part of the wall time -> (label, what it means)
ACCOUNT_PARTS = {
    "start_up": ("Start-up", "Imports, process group, model and first batch."),
    "first_steps": ("First steps", "Warm-up: compilation, autotuning, caches that fill."),
    "training": ("Steady training", "Training steps after the warm-up."),
    "evaluation": ("Evaluation", "The model was evaluated."),
    "collecting": ("Collecting experience", "The model acted to collect what it learns from."),
    "generating": ("Generating", "The model generated samples."),
    "without_gradients": ("Without gradients", "Passes without gradients outside the steps."),
    "checkpoint": ("Checkpoints", "Checkpoints were saved."),
    "between_epochs": ("Between epochs", "From an epoch's last step to the next one's first."),
    "windows": (
        "stepscope's profiling",
        "Steps in which stepscope's profiler or memory capture ran.",
    ),
    "outside": ("Outside any step", "Time that belongs to no step."),
    "shut_down": ("Shut-down", "From the last step to the end of the command."),
}
_Value = TypeVar("_Value")
_NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|std::|c10::")


def printable(text: str) -> str:
    """Replace control characters by visible symbols; line breaks stay."""
    return text if text.isprintable() else "".join(map(_symbol, text))


def one_line(text: str) -> str:
    """Replace line breaks too, for a name or a sentence with names in it."""
    return printable(text).replace("\n", "\u240a")


def _symbol(char: str) -> str:
    if char == "\n" or char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else "\ufffd"


def applied_line(origin: RunOrigin | None) -> str:
    """bf16, fused-optimizer; tf32 was refused: it needs a CUDA device. "" for a plain run."""
    remedies = origin.remedies if origin else ()
    applied = [remedy.words for remedy in remedies if remedy.outcome == "applied"]
    others = [remedy.words for remedy in remedies if remedy.outcome != "applied"]
    return "; ".join([*([", ".join(applied)] if applied else []), *others])


def failed_line(explanation: Explanation) -> str:
    """exit code 1 after step 1,200: ValueError: bad batch (train.py:33 in main). "" for a command
    that ended well. The steps that were seen stand in where no process told."""
    failed = explanation.origin.failed if explanation.origin else None
    if failed is None:
        return ""
    if failed.step is None and explanation.run is not None:
        steps = max((rank.steps for rank in explanation.run.ranks), default=0)
        failed = replace(failed, step=steps)
    return f"the command failed: {failed.words}"


def or_dash(value: _Value | None, words: Callable[[_Value], str]) -> str:
    """What is not known has a dash."""
    return "-" if value is None else words(value)


def short_kernel(name: str, width: int) -> str:
    """A kernel's C++ name without return type and namespaces; the middle is cut if it is long."""
    text = _NOISE.sub("", name)
    text = re.sub(r"\(.*\)\s*(\[.*\])?$", "", text) or name
    if len(text) <= width:
        return text
    keep = max(4, width - 1)
    front = keep * 2 // 3
    return f"{text[:front]}…{text[len(text) - (keep - front) :]}"
