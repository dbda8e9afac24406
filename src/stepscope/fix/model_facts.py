"""What the modules that train are made of, and what their device can do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.fix.blocks import checkpoint_switch, find_blocks
from stepscope.fix.compiled_modules import is_compiled
from stepscope.fix.frames import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
