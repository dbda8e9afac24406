"""Combinations that a good engineer tries by hand on the library models, without stepscope.

    python benchmarks/library_hand.py [--models llama,swin] [--seconds 560] --out hand.json

Each model has a process of its own, in which every combination builds the model anew, takes 12
steps to warm up and is timed over 30, in blocks of ten with the device waited for at the ends. fp32
eager comes first and, as a control, once more at the end. Results of models that --out already
holds are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import library_results
from library_turn import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

WARM_UP, BLOCKS, BLOCK = 12, 3, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One way to run the same training."""

    precision: str = "fp32"  # fp32, tf32, bf16 or fp16
    fused: bool = False
    images: bool = False  # channels-last, and cuDNN tries its algorithms
    compile: str = ""  # torch.compile's mode

    @property
    def words(self) -> str:
        return "+".join(
            word
            for word, is_on in (
                (self.precision, True),
                ("fused", self.fused),
                ("channels-last+cudnn-benchmark", self.images),
                (f"compile={self.compile}", self.compile),
            )
            if is_on
        )


PLAIN = Combination()
FOR_ALL = (
    PLAIN,
    Combination(precision="tf32"),
    Combination(precision="bf16"),
    Combination(precision="tf32", fused=True),
    Combination(precision="bf16", fused=True),
    Combination(precision="tf32", fused=True, compile="default"),
    Combination(precision="bf16", fused=True, compile="default"),
    Combination(precision="bf16", fused=True, compile="reduce-overhead"),
)
FOR_IMAGES = (
    Combination(precision="tf32", fused=True, images=True),
    Combination(precision="bf16", fused=True, images=True),
    Combination(precision="tf32", fused=True, images=True, compile="default"),
    Combination(precision="bf16", fused=True, images=True, compile="default"),
)
THOROUGH = (
    Combination(precision="fp16", fused=True),
    Combination(precision="fp16", fused=True, compile="default"),
    Combination(precision="tf32", fused=True, compile="reduce-overhead"),
    Combination(precision="bf16", fused=True, compile="max-autotune-no-cudagraphs"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", help="names with commas between; all without it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/library_hand.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all models")
    parser.add_argument("--per-model", type=float, default=240.0, help="seconds at most for one")
    parser.add_argument(
        "--at-once", type=int, default=1, help="models beside each other; each is timed alone"
    )
    parser.add_argument(
        "--turns", type=Path, default=Path(tempfile.gettempdir()) / "library-hand-turns"
    )
    parser.add_argument("--thorough", action="store_true", help="rarer combinations too")
    parser.add_argument("--combinations", default="", help="only these, with commas between")
    parser.add_argument("--again", action="store_true", help="models that --out holds too")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU can train")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _one_model(options.one, options)
    else:
        _all_models(options)


def _all_models(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.seconds
    done = {} if options.again else library_results.read(options.out)
    names = [
        name
        for name in library_results.chosen(options.models)
        if name not in done or not done[name].get("finished")
    ]
    turns = Turns(options.turns)
    with turns.kept_going(), ThreadPoolExecutor(options.at_once) as pool:
        for name, failure in pool.map(lambda name: (name, _child(name, options, end)), names):
            if failure:
                print(f"{name}: {failure}", flush=True)
    print_best(library_results.read(options.out))


def _child(name: str, options: argparse.Namespace, end: float) -> str | None:
    """Why the model has no full result, or None. Its process prints by itself."""
    limit_s = min(options.per_model, end - time.monotonic())
    if limit_s < 20:
        return "not tried: no time left"
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--one", name])
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"stopped after {limit_s:.0f} s; what was measured until then is kept"
    return f"exit code {code}" if code else None


def _one_model(name: str, options: argparse.Namespace) -> None:
    import torch

    began = time.perf_counter()
    script = importlib.import_module(f"library_models.{name}")
    batch = options.batch or script.BATCH
    Turns(options.turns).enter()
    torch.manual_seed(0)
    batches = script.make_batches(batch, options.device, options.tiny)
    measured: dict[str, dict[str, Any]] = {}
    result = {"batch": batch, "combinations": measured, "finished": False}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    for words, combination in _plan(options, images=_has_images(batches[0])):
        try:
            measured[words] = _measure(script, batches, combination, options)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            measured[words] = {"failure": f"{type(error).__name__}: {lines[0][:200]}"}
        print(f"{name:12} {words:60} {_outcome(measured[words])}", flush=True)
        library_results.save(options.out, name, result)
    result["finished"] = True
    result["seconds"] = time.perf_counter() - began
    library_results.save(options.out, name, result)
    print(f"{name}: {result['seconds']:.0f} s", flush=True)


def _plan(options: argparse.Namespace, *, images: bool) -> Iterator[tuple[str, Combination]]:
    wanted = options.combinations.split(",") if options.combinations else None
    for combination in FOR_ALL + FOR_IMAGES * images + THOROUGH * options.thorough:
        if wanted is None or combination.words in wanted:
            yield combination.words, combination
    yield "fp32 again", PLAIN


def _has_images(batch: Any) -> bool:
    tensors = batch if isinstance(batch, tuple) else (batch,)
    return any(tensor.dim() == 4 for tensor in tensors)


def _measure(
    script: Any, batches: list[Any], combination: Combination, options: argparse.Namespace
) -> dict[str, Any]:
    import torch

    torch._dynamo.reset()
    gc.collect()
    is_cuda = options.device == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    wait = torch.cuda.synchronize if is_cuda else (lambda: None)
    began = time.perf_counter()
    step = training_step(script, batches, combination, options.device, tiny=options.tiny)
    warm_up = 3 if options.tiny else WARM_UP
    for number in range(warm_up):
        step(number)
    wait()
    ready_s = time.perf_counter() - began
    blocks_ms = []
    with Turns(options.turns).alone():
        for block in range(BLOCKS):
            start = time.perf_counter()
            for number in range(BLOCK):
                loss = step(warm_up + block * BLOCK + number)
            wait()
            blocks_ms.append((time.perf_counter() - start) * 1e3 / BLOCK)
    return {
        "ms": statistics.median(blocks_ms),
        "low_ms": min(blocks_ms),
        "high_ms": max(blocks_ms),
        "ready_s": ready_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "loss": float(loss),
    }


def training_step(
    script: Any, batches: list[Any], combination: Combination, device: str, *, tiny: bool
) -> Callable[[int], Any]:
    """The script's own loop body, with the combination written into it."""
    import torch

    precise = combination.precision != "tf32"
    torch.set_float32_matmul_precision("highest" if precise else "high")
    torch.backends.cudnn.benchmark = combination.images
    torch.manual_seed(0)
    with torch.device(device):
        model = script.build(tiny)
    if combination.images:
        model = model.to(memory_format=torch.channels_last)
        batches = [_channels_last(batch) for batch in batches]
    if combination.compile:
        model.compile(mode=combination.compile)
    fused = {"fused": True} if combination.fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=script.LEARNING_RATE, **fused)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(combination.precision)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step(number: int) -> Any:
        context = torch.autocast(device, dtype) if dtype else contextlib.nullcontext()
        with context:
            loss = script.loss_of(model, batches[number % len(batches)])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _channels_last(batch: Any) -> tuple[Any, ...]:
    import torch

    return tuple(
        tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
        for tensor in batch
    )


def _outcome(measured: dict[str, Any]) -> str:
    if "failure" in measured:
        return str(measured["failure"])
    spread = f"({measured['low_ms']:.2f} to {measured['high_ms']:.2f})"
    return f"{measured['ms']:8.2f} ms {spread}, ready in {measured['ready_s']:.0f} s"


def best(result: dict[str, Any], without: Collection[str] = ()) -> tuple[str, float] | None:
    """The fastest combination and its milliseconds, of those without some of the remedies."""
    timed = {
        words: row["ms"]
        for words, row in result["combinations"].items()
        if "ms" in row and not set(without) & set(words.split("+"))
    }
    return min(timed.items(), key=lambda item: item[1]) if timed else None


def print_best(results: dict[str, Any]) -> None:
    for name, result in results.items():
        plain = result["combinations"].get(PLAIN.words, {}).get("ms")
        fastest = best(result)
        if fastest is not None and plain is not None:
            words, ms = fastest
            print(f"{name:12} {plain:8.2f} -> {ms:8.2f} ms  {plain / ms:5.2f}x  {words}")


if __name__ == "__main__":
    main()
