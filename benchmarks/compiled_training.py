"""One training of compiled_table.py, in the process that `stepscope run` captures.

It counts the FLOPs of an eager pass, compiles beside other trainings, then has the device to itself
from the first optimizer step to the last, and writes what it measured.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import torch

from compiled_models import MODELS
from driver_memory import count_and_release
from library_turn import shared_turns
from outside_pools import bytes_outside_pools
from torchs_flops import count_training

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], Any]

WARM, TIMED = 6, 12  # steps
_EARLIER = 8  # at most as many passes come before, which capture may count as steps
WAIT, WARMUP, ACTIVE = WARM + TIMED + _EARLIER, 2, 3  # the profiler's window
STEPS = WAIT + WARMUP + ACTIVE + 11  # memory and the host's own time are measured after the window
COMPILED = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def train(name: str, way: str, precision: str, save: Path, *, tiny: bool) -> None:
    """The training's own account of itself goes to `save`."""
    turns = shared_turns()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(0)
    model, batch = MODELS[name](tiny=tiny)
    model.to(device)
    batch = tuple(one.to(device) for one in batch)
    cast = torch.autocast(
        device.type,
        torch.bfloat16,
        enabled=precision == "bf16",
        cache_enabled=way != "graphed callables",  # torch refuses to capture the cache
    )
    flops, again = count_training(partial(_pass, model, batch, cast))
    model.zero_grad()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held: dict[str, Any] = {"model": model, "batch": batch}
    held["called"] = _compiled(way, model, batch, cast)
    del model, batch
    gc.collect()  # what compiling left is not collected inside a step
    with turns.alone() if turns is not None else contextlib.nullcontext():
        held["step"] = _stepper(way, held, cast, on_gpu=on_gpu)
        measured = _measure(held, on_gpu=on_gpu)
    facts = {"eager_flops": flops, "model_flops": flops - again, **measured}
    facts["alone_s"] = turns.alone_s if turns is not None else None
    save.write_text(json.dumps(facts))


def _measure(held: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """All steps, and what the device holds after them; what `held` names is let go."""
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    now = _device_moment if on_gpu else time.perf_counter
    ends = [now()]
    _repeat(held, WARM, ends, now)
    wait()
    began = time.perf_counter()
    _repeat(held, TIMED, ends, now)
    wait()
    bare_ms = 1e3 * (time.perf_counter() - began) / TIMED
    _repeat(held, STEPS - WARM - TIMED - 1, ends, now)
    if on_gpu:
        held["look"] = lambda: held.setdefault("outside", []).append(bytes_outside_pools())
    _repeat(held, 1, ends, now)
    wait()
    steps_ms = [round(_ms_between(*pair), 3) for pair in pairwise(ends)]
    facts: dict[str, Any] = {"bare_ms": bare_ms, "steps_ms": steps_ms, "torch": torch.__version__}
    if not on_gpu:
        return {**facts, "device": "cpu", "allocated_bytes": None, "driver_bytes": None}
    return {
        **facts,
        "device": torch.cuda.get_device_name(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "cached_bytes": min(one.cached_bytes for one in held["outside"]),
        **asdict(count_and_release(held)),
    }


def _repeat(held: dict[str, Any], times: int, ends: list[Any], now: Step) -> None:
    for _ in range(times):
        held["step"]()
        ends.append(now())


def _device_moment() -> Any:
    """When the device is done with what was launched before."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


def _pass(called: Step, batch: Any, cast: Any) -> None:
    with cast:
        loss = called(*batch)
    loss.backward()


def _compiled(way: str, model: Any, batch: Any, cast: Any) -> Any:
    """What a step calls, compiled. The wait for the turn follows one slow pass and comes before all
    quick ones: so it belongs to the warm-up and does not look like a stall."""
    if way == "graphed callables":
        with cast:
            return torch.cuda.make_graphed_callables(model, batch)
    if way not in COMPILED:
        return model
    called = torch.compile(model, mode=None if way == "default" else way)
    _pass(called, batch, cast)
    model.zero_grad()
    return called


def _stepper(way: str, held: dict[str, Any], cast: Any, *, on_gpu: bool) -> Step:
    """One training step in this way."""
    whole = way == "whole-step graph"
    called, batch = held["called"], held["batch"]
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-5, fused=on_gpu, capturable=whole)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not whole)
        _pass(called, batch, cast)
        look = held.get("look", _nothing)
        look()
        optimizer.step()
        look()

    held["optimizer"] = optimizer  # a graph does not keep it
    return _recorded(step, held) if whole else step


def _nothing() -> None:
    """Until memory is looked at."""


def _recorded(step: Step, held: dict[str, Any]) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        held.get("look", _nothing)()

    return replay
