"""What else a training thread does inside a step: evaluates, saves, collects garbage, compiles.

Each is noted where it begins and ends, like the phases of every step (step_notes.py). None of these
calls is frequent, so none costs a step anything when it does not happen.
"""

from __future__ import annotations

import functools
import gc
import sys
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.after_import import when_imported
from stepscope.measure.attached import replace, when_detached
from stepscope.measure.dynamo import surrounds
from stepscope.measure.never_raise import never_raise
from stepscope.measure.step_notes import ENTER, GRAPHS, LEAVE, MODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.measure.session import Session

SHORTEST_COLLECTION_NS = 100_000  # shorter ones stay in the phase around them
# Where checkpoints are written: module, and function or method. One inside another counts once.
# Lightning saves to memory first, then to its file.
SAVING = (
    ("torch.serialization", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"),
    ("lightning.fabric.utilities.cloud_io", "_atomic_save"),
    ("lightning_fabric.utilities.cloud_io", "_atomic_save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.numpy", "save_file"),
    ("pickle", "dump"),
    *(
        (module, function)
        for module in ("numpy.lib._npyio_impl", "numpy.lib.npyio")  # numpy 2, numpy 1
        for function in ("save", "savez", "savez_compressed")
    ),
    ("joblib.numpy_pickle", "dump"),
    ("transformers.trainer", "Trainer._save_checkpoint"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    ("accelerate.accelerator", "Accelerator.save_state"),
)


@never_raise
def watch_rare_phases(session: Session) -> None:
    """Attach to torch and to Python's collector; once, when torch has been imported."""
    _watch_collector(session)
    _watch_modes(session)
    for module, function in SAVING:
        when_imported(module, functools.partial(_watch_saving, session, function))
    session.compiler.attach()
    when_imported("torch._dynamo.callback", functools.partial(_watch_compiler, session))


def _watch_collector(session: Session) -> None:
    """Both notes are written when a collection ends: it is too short for any other to come."""
    notes = session.notes
    began = 0

    def collecting(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if get_ident() != session.thread:
            return
        now = perf_counter_ns()
        if phase == "start":
            began = now
        elif began and now - began >= SHORTEST_COLLECTION_NS:
            notes.append((ENTER, began, "gc"))
            notes.append((LEAVE, now, "gc"))

    gc.callbacks.append(collecting)
    when_detached(lambda: gc.callbacks.remove(collecting))


def _watch_modes(session: Session) -> None:
    """`eval()` is `train(False)`, and both call the same of every module inside."""
    from torch.compiler import is_compiling
    from torch.nn import Module

    original = Module.train
    notes = session.notes
    inside = False

    @surrounds
    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        nonlocal inside
        if inside or is_compiling() or get_ident() != session.thread:
            return original(self, mode)
        inside = True
        try:
            return original(self, mode)
        finally:
            inside = False
            notes.append((MODE, perf_counter_ns(), bool(mode)))

    replace(Module, "train", train)


def _watch_saving(session: Session, name: str, module: Any) -> None:
    inside, _, name = name.rpartition(".")
    owner = getattr(module, inside, None) if inside else module
    original = getattr(owner, name, None)
    if original is None:
        return
    saving = _as_phase(session, original, "checkpoint")
    replace(owner, name, saving)
    for package in _packages_above(module.__name__):
        if vars(package).get(name) is original:
            replace(package, name, saving)


def _packages_above(module: str) -> list[Any]:
    """They may hold the module's functions by the same name."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(1, len(parts))]
    return [sys.modules[name] for name in names if name in sys.modules]


def _as_phase(session: Session, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
    from torch.compiler import is_compiling

    notes = session.notes

    @surrounds
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != session.thread:
            return original(*args, **kwargs)
        notes.append((ENTER, perf_counter_ns(), phase))
        try:
            return original(*args, **kwargs)
        finally:
            notes.append((LEAVE, perf_counter_ns(), phase))

    return call


def _watch_compiler(session: Session, module: Any) -> None:
    """Dynamo says itself when it begins to compile and when it has ended."""
    notes = session.notes
    handler = module.callback_handler
    before = 0

    def begins(*args: Any) -> None:
        nonlocal before
        session.compiler.begins(getattr(args[0], "compile_id", None) if args else None)
        if get_ident() == session.thread:
            before = _graphs_compiled()
            notes.append((ENTER, perf_counter_ns(), "compile"))

    def ends(*args: Any) -> None:
        session.compiler.look(getattr(args[0], "compile_id", None) if args else None)
        if get_ident() == session.thread:
            now = perf_counter_ns()
            notes.append((LEAVE, now, "compile"))
            graphs = _graphs_compiled() - before
            if graphs > 0:
                notes.append((GRAPHS, now, graphs))

    def register() -> None:
        handler.register_start_callback(begins)
        handler.register_end_callback(ends)

    clear = handler.clear

    @surrounds
    @functools.wraps(clear)
    def cleared(*args: Any, **kwargs: Any) -> Any:
        """`torch._dynamo.reset` removes all callbacks."""
        try:
            return clear(*args, **kwargs)
        finally:
            register()

    def unregister() -> None:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)

    register()
    when_detached(unregister)
    replace(handler, "clear", cleared)


@never_raise
def _graph_counter() -> int:
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def _graphs_compiled() -> int:
    return _graph_counter() or 0
