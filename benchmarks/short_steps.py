"""What capture costs short steps: one training with capture taken off and put back, step by step.

    python benchmarks/short_steps.py [NAME...] [--steps 6000] [--json FILE]

Two processes of one script differ by more than what is looked for: memory layout, core, clock; and
so do two seconds of one process. So each training of workloads/short_steps.py runs in one process,
and before every step a coin decides whether capture is in place or removed from torch. Where the
device decides the step, the host's time of one step says nothing: those run in turns of some 50 ms
that end with the device. `before` is a capture whose window is still to come, `after` one whose
window is over.

Printed are the bare step, the ratio of means (of steps, each at most CLIP times the median) for
wall and for processor time with 95% intervals from resampling, the share of the steps that was
noted in full, and what capture's own threads used of one core. Needs torch and the standard library
only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent.parent / "src"), str(Path(__file__).parent)]

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDES = ("before", "after")
FIRST = 60  # steps before capture's own are measured
TURN_S, SETTLE = 0.05, 3
RESAMPLINGS = 1000
CLIP = 2.0
ON_DEVICE = ("gpt2", "graphed")
FAR = 1 << 40  # a window that never comes


def main() -> None:
    options = _options()
    if options.child:
        _train(*options.child, steps=options.steps, null=options.null)
        return
    rows = []
    print(
        f"{'training':18}{'window':8}{'step':>10}{'wall':>26}{'processor':>26}{'noted':>9}{'threads':>9}"
    )
    for name in options.names or _usual_names():
        for side in SIDES:
            row = _measured(name, side, options)
            rows.append(row)
            print(_line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--null", action="store_true", help="switch nothing: what the method says")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _usual_names() -> tuple[str, ...]:
    import torch

    from workloads.short_steps import ON_CPU, ON_GPU

    return ON_GPU if torch.cuda.is_available() else (*ON_CPU, "tiny in a thread")


def _measured(name: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--steps", str(options.steps), "--child", name, side]
    command += ["--null"] if options.null else []
    ranks = 2 if name == "ddp" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **job, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    row: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return {"training": name, "window": side, **row}


def _line(row: dict[str, Any]) -> str:
    def ratio(value: dict[str, float]) -> str:
        return f"{value['ratio']:.4f} ({value['low']:.4f}-{value['high']:.4f})"

    return (
        f"{row['training']:18}{row['window']:8}{row['bare_us']:>7.0f} us{ratio(row['wall']):>26}"
        f"{ratio(row['processor']):>26}{row['noted']:>9.1%}{row['threads']:>9.2%}"
    )


# In the process that trains.


def _train(name: str, side: str, *, steps: int, null: bool) -> None:
    import torch

    if name.endswith("in a thread"):
        from workloads.short_steps import in_thread

        in_thread(lambda: _take_turns(name.split()[0], side, steps, null=null))
    else:
        _take_turns(name, side, steps, null=null)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _take_turns(name: str, side: str, steps: int, *, null: bool) -> None:
    import torch

    from workloads.short_steps import build

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch:
        switch = Switch(scratch, wait=FAR if side == "before" else None)
        step = build(name, "cuda" if torch.cuda.is_available() else "cpu")
        for _ in range(FIRST):
            step()
        for _ in range(FIRST):
            step()
        switch.is_null = null
        threads = _threads_s()
        began = time.perf_counter()
        if name in ON_DEVICE:
            bare, ours = _in_turns(switch, step, steps)
        else:
            bare, ours = _step_by_step(switch, step, steps)
        share = (_threads_s() - threads) / (time.perf_counter() - began)
        noted = 1 / switch.session.pace.apart
        switch.session.close()
    result = {
        "bare_us": statistics.median(wall for wall, _ in bare) * 1e6,
        "wall": _ratio([wall for wall, _ in bare], [wall for wall, _ in ours]),
        "processor": _ratio([used for _, used in bare], [used for _, used in ours]),
        "noted": noted,
        "threads": share,
    }
    print(json.dumps(result))


Times = list[tuple[float, float]]  # of a step: wall, processor


def _step_by_step(switch: Switch, step: Any, steps: int) -> tuple[Times, Times]:
    """The same coins on every rank."""
    coins = random.Random(0)
    times: dict[bool, Times] = {False: [], True: []}
    for _ in range(steps):
        on = coins.random() < 0.5
        switch.turn(on=on)
        wall, used = time.perf_counter(), time.process_time()
        step()
        times[on].append((time.perf_counter() - wall, time.process_time() - used))
    return times[False], times[True]


def _in_turns(switch: Switch, step: Any, steps: int) -> tuple[Times, Times]:
    import torch

    began = time.perf_counter()
    for _ in range(SETTLE * FIRST):
        step()
    torch.cuda.synchronize()
    length = max(2, round(TURN_S * SETTLE * FIRST / (time.perf_counter() - began)))
    times: dict[bool, Times] = {False: [], True: []}
    for number in range(max(20, steps // (2 * length))):
        for on in random.Random(number).sample((False, True), 2):
            switch.turn(on=on)
            for _ in range(SETTLE):
                step()
            torch.cuda.synchronize()
            wall, used = time.perf_counter(), time.process_time()
            for _ in range(length):
                step()
            torch.cuda.synchronize()
            times[on].append(
                (
                    (time.perf_counter() - wall) / length,
                    (time.process_time() - used) / length,
                )
            )
    return times[False], times[True]


def _threads_s() -> float:
    """Processor time of capture's threads."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("stepscope")]
    used = 0.0
    for thread in ours:
        with contextlib.suppress(OSError):
            used += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return used


class Switch:
    """Removes every part of capture from the training process, and puts it back."""

    def __init__(self, folder: str, wait: int | None) -> None:
        import torch
        import torch.amp.grad_scaler
        import torch.utils.data.dataloader
        from torch.optim import optimizer
        from torch.utils.data._utils import fetch

        from stepscope.measure.hooks import install
        from stepscope.measure.session.session import Session
        from stepscope.measure.settings import Settings

        owners: tuple[Any, ...] = (
            torch.autograd,
            torch.autograd.graph,
            torch.nn.Module,
            torch.utils.data.dataloader.DataLoader,
            torch.utils.data.dataloader._BaseDataLoaderIter,
            fetch._MapDatasetFetcher,
            fetch._IterableDatasetFetcher,
            torch.amp.grad_scaler.GradScaler,
            torch.cuda.CUDAGraph,
        )
        before = [dict(vars(owner)) for owner in owners]
        hooks: tuple[dict[int, Any], ...] = (
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        )
        collections = list(gc.callbacks)
        self.session = Session(Settings(folder=folder, wait=wait))
        install(self.session)
        self._names = [
            (owner, name, bare.get(name), ours)
            for owner, bare in zip(owners, before, strict=True)
            for name, ours in vars(owner).items()
            if bare.get(name) is not ours and callable(ours)
        ]
        self._hooks = [(registered, dict(registered)) for registered in hooks]
        self._collections = [callback for callback in gc.callbacks if callback not in collections]
        self._on = True
        self.is_null = False

    def turn(self, *, on: bool) -> None:
        if on == self._on or self.is_null:
            return
        self._on = on
        for owner, name, bare, ours in self._names:
            if on or bare is not None:
                setattr(owner, name, ours if on else bare)
            else:
                delattr(owner, name)
        if on and self.session.pace.passing.on:
            for engine in self.session.engines:
                engine.leave()
        for registered, hooks in self._hooks:
            registered.clear()
            registered.update(hooks if on else {})
        for callback in self._collections:
            (gc.callbacks.append if on else gc.callbacks.remove)(callback)
        parts = self.session._parts
        if on and parts is not None and parts.device is not None:
            parts.device.restart()


def _ratio(bare: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    import numpy as np

    draw = np.random.default_rng(0)

    def means(values: Sequence[float]) -> Any:
        column = np.minimum(values, CLIP * statistics.median(values))
        picks = draw.integers(len(column), size=(RESAMPLINGS, len(column)), dtype=np.int32)
        return np.concatenate(([column.mean()], column[picks].mean(axis=1)))

    ratios = means(ours) / means(bare)
    low, high = np.quantile(ratios[1:], (0.025, 0.975))
    return {"ratio": float(ratios[0]), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
