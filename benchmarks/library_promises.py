"""Promises about library models, written down before anything is measured, then measured.

    PYTHONPATH=src python3 benchmarks/library_promises.py --seconds 500 --save promises.json
        [--models llama,swin] [--at-once 3] [--tiny] [--docs docs/records/predictions.md]

Each model trains in fp32 eager under `stepscope run`. From its folder come two promises for each
change: without operator times, and with those that `probe` measured. Only then another process
trains the model with each change, without a profiler, in turns with the unchanged one, and measures
step and peak. Rows are saved at once; what is there is not done again. `--tiny` runs small models
on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "src"))

import library_results
from library_turn import FOLDER_VARIABLE, Turns, shared_turns
from promise_rows import print_table, write_docs

# The most telling changes first.
CHANGES = (
    "precision=bf16",
    "precision=tf32",
    "batch=x2",
    "batch=x0.5",
    "checkpoint=blocks",
    "optimizer=fused",
)
_WARM_UP, _BLOCKS, _BLOCK = 5, 4, 4
_TINY_BATCH = 4
_LEAST_S = 20.0  # no model is begun with less


def main() -> None:
    options = _parser().parse_args()
    if options.alone:
        sys.exit(_run_alone(json.loads(options.alone)))
    if options.measure:
        _measure_model(options.measure, options)
        return
    end = time.monotonic() + options.seconds
    options.work.mkdir(parents=True, exist_ok=True)
    folder = Path(os.environ.get(FOLDER_VARIABLE) or options.work.absolute() / "turns")
    os.environ[FOLDER_VARIABLE] = str(folder)
    names = library_results.chosen(options.models)
    with Turns(folder).kept_going(), ThreadPoolExecutor(options.at_once) as pool:
        for first in range(0, len(names), options.at_once):
            group = names[first : first + options.at_once]
            # One after the other: what-ifs keep cores busy, and captures measure the host.
            for part in (_capture, _probe_and_promise, _measure_changes):
                list(pool.map(functools.partial(_try, part, end, options), group))
    results = library_results.read(options.save)
    print_table(results)
    if options.docs:
        write_docs(options.docs, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--save", type=Path, default=Path("promises.json"))
    parser.add_argument("--work", type=Path, default=Path("promises-work"))
    parser.add_argument("--models", default="")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--probe-budget", default="15s")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    return parser


def _try(
    part: Callable[[str, dict[str, Any], float, argparse.Namespace], None],
    end: float,
    options: argparse.Namespace,
    name: str,
) -> None:
    result = library_results.read(options.save).get(name) or {"promises": {}, "measured": {}}
    if result.get("finished") or (part is not _capture and "failure" in result):
        return
    if end - time.monotonic() < _LEAST_S:
        print(f"{name}: no time left", flush=True)
        return
    try:
        part(name, result, end, options)
        result.pop("failure", None)
    except Exception as error:
        result["failure"] = repr(error)[-600:]
    library_results.save(options.save, name, result)
    print(f"{name}: {part.__name__} {result.get('failure') or 'done'}", flush=True)


# promising


def _capture(name: str, result: dict[str, Any], end: float, options: argparse.Namespace) -> None:
    del result
    folder = options.work / name
    if not (folder / "run.json").exists():
        script = [str(library_results.script(name)), *_script_options(options)]
        turn = [str(Path(__file__).parent / "library_turn.py"), os.environ[FOLDER_VARIABLE]]
        command = ["run", "--quiet", "--no-explain", "--out", str(folder), "--", sys.executable]
        _stepscope([*command, *turn, *script], end, _library(name, options))


def _probe_and_promise(
    name: str, result: dict[str, Any], end: float, options: argparse.Namespace
) -> None:
    """Promise, probe, promise again; nothing of what is measured later is known yet."""
    folder, library = options.work / name, _library(name, options)
    if not result["promises"].get("modelled"):
        result["promises"]["modelled"] = _promise_all(folder, end, library)
    if not result["promises"].get("probed"):
        wanted = [word for change in CHANGES[:4] for word in ("--set", change)]
        budget = ["--budget", options.probe_budget]
        try:
            _stepscope(["probe", str(folder), *wanted, *budget, "--json"], end, library, alone=True)
        except RuntimeError as error:
            result["probe_failure"] = str(error)[-300:]
        result["promises"]["probed"] = _promise_all(folder, end, library)


def _measure_changes(
    name: str, result: dict[str, Any], end: float, options: argparse.Namespace
) -> None:
    if not result["promises"].get("probed"):
        raise RuntimeError("nothing was promised")
    result["measured"] |= _run_measuring(name, end, options)
    result["finished"] = True


def _library(name: str, options: argparse.Namespace) -> dict[str, str]:
    return {"STEPSCOPE_LIBRARY": str((options.work / f"{name}-library").absolute())}


def _script_options(options: argparse.Namespace) -> list[str]:
    tiny = ["--device", "cpu", "--tiny", "--batch", str(_TINY_BATCH)] if options.tiny else []
    return ["--steps", "16" if options.tiny else "40", *tiny]


def _promise_all(folder: Path, end: float, variables: dict[str, str]) -> dict[str, Any]:
    return {change: _promise_one(folder, change, end, variables) for change in CHANGES}


def _promise_one(folder: Path, change: str, end: float, variables: dict[str, str]) -> Any:
    try:
        text = _stepscope(["whatif", str(folder), "--set", change, "--json"], end, variables)
    except RuntimeError as error:
        return {"refused": str(error)[-300:]}
    answer = json.loads(text)
    names = ("baseline_ms", "predicted_ms", "low_ms", "high_ms")
    peaks = ("peak_bytes", "peak_low_bytes", "peak_high_bytes", "baseline_peak_bytes")
    return {key: answer.get(key) for key in (*names, *peaks, "refused")}


def _stepscope(
    words: list[str], end: float, variables: dict[str, str], *, alone: bool = False
) -> str:
    """Raises RuntimeError with the last lines of a command that failed. `alone` on the device: a
    process between them takes the turn, which this one cannot, as it wakes the others."""
    command = ["-m", "stepscope", *words]
    done = subprocess.run(
        [sys.executable, *([__file__, "--alone", json.dumps(command)] if alone else command)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=max(5.0, end - time.monotonic() + 20),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{words[0]}: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout


def _run_alone(words: list[str]) -> int:
    turns = shared_turns()
    with turns.alone() if turns else contextlib.nullcontext():
        return subprocess.run([sys.executable, *words], check=False).returncode


# measuring


def _run_measuring(name: str, end: float, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, *(["--tiny"] if options.tiny else [])]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=max(30.0, end - time.monotonic() + 60),
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(f"measuring: {done.stderr[-500:]}")
    return {row.pop("change"): row for row in rows}


def _measure_model(name: str, options: argparse.Namespace) -> None:
    """The unchanged step, then every change in turns with it; a row for each on stdout."""
    turns = shared_turns()  # before the imports: they would slow the host of a model being timed
    module = importlib.import_module(f"library_models.{name}")
    base = None
    for change in ("", *CHANGES):
        try:
            with turns.alone() if turns else contextlib.nullcontext():
                base = base or Training(module, "", tiny=options.tiny)
                row = _measure(base, module, change, tiny=options.tiny)
        except Exception as error:
            row = {"failure": repr(error)[-300:]}
        print(json.dumps({"change": change, **row}), flush=True)


def _measure(base: Training, module: Any, change: str, *, tiny: bool) -> dict[str, Any]:
    training = base if not change else Training(module, change, tiny=tiny)
    pairs = [(base.block_ms(), training.block_ms()) for _ in range(1 if tiny else _BLOCKS)]
    bases_ms, blocks_ms = ([pair[side] for pair in pairs] for side in (0, 1))
    return {
        "step_ms": statistics.median(blocks_ms),
        "base_ms": statistics.median(bases_ms),
        "blocks_ms": blocks_ms,
        "base_blocks_ms": bases_ms,
        "peak_bytes": training.peak_bytes,
    }


class Training:
    """A model that trains with one change, warm, and its peak of memory so far."""

    def __init__(self, module: Any, change: str, *, tiny: bool) -> None:
        import torch

        self._torch, self._module, self._change = torch, module, change
        self._device = "cpu" if tiny else "cuda"
        before = self._settle()
        torch.manual_seed(0)
        with torch.device(self._device):
            self._model = module.build(tiny).to(self._device)
        if change == "checkpoint=blocks":
            _checkpoint(self._model)
        times = float(change.partition("=x")[2]) if change.startswith("batch") else 1.0
        batch = round((_TINY_BATCH if tiny else module.BATCH) * times)
        self._batches = module.make_batches(batch, self._device, tiny)
        rate = getattr(module, "LEARNING_RATE", 1e-4)
        fused = {"fused": True} if change == "optimizer=fused" else {}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, **fused)
        self.block_ms(2 if tiny else _WARM_UP)
        self.peak_bytes = None if tiny else torch.cuda.max_memory_allocated() - before

    def block_ms(self, steps: int = _BLOCK) -> float:
        """Milliseconds of a step, as the mean over a block of them."""
        torch = self._torch
        torch.backends.cuda.matmul.allow_tf32 = self._change == "precision=tf32"
        self._wait()
        began = time.perf_counter()
        for number in range(steps):
            self._step(number)
        self._wait()
        return (time.perf_counter() - began) / steps * 1e3

    def _step(self, number: int) -> None:
        bf16 = self._change == "precision=bf16"
        with self._torch.autocast(self._device, self._torch.bfloat16, enabled=bf16):
            loss = self._module.loss_of(self._model, self._batches[number % len(self._batches)])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def _settle(self) -> int:
        """Bytes that others hold."""
        if self._device != "cuda":
            return 0
        gc.collect()
        self._torch.cuda.empty_cache()
        self._torch.cuda.reset_peak_memory_stats()
        return int(self._torch.cuda.memory_allocated())


def _checkpoint(model: Any) -> None:
    """As the remedy activation-checkpointing does it."""
    from torch.utils.checkpoint import checkpoint

    from stepscope.fix.model_structure import checkpoint_switch, find_blocks

    blocks, switch = find_blocks(model), checkpoint_switch(model)
    if blocks is None:
        raise ValueError("the model has no repeated blocks")
    if switch is not None:
        kind = {"use_reentrant": False}
        model.get_submodule(switch).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=kind
        )
        return
    for block in blocks.modules:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


if __name__ == "__main__":
    main()
