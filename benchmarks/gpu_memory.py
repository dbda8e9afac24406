"""Memory on a GPU, to check what `explain` reports: run folders, snapshots, the largest batch.

    python benchmarks/gpu_memory.py train --out DIR [fp32:4 fp32:8 bf16:4 ...]
    python benchmarks/gpu_memory.py snapshot --out DIR
    python benchmarks/gpu_memory.py fit --limit 8e9 --dtype fp32 --largest 4

train     GPT-2 small with AdamW under capture, one process per config; DIR/<dtype>-b<batch> is a
          run folder, DIR/truth.json has torch's own peak and the bytes of what the script holds
snapshot  a small model's steps with stacks, then a request that cannot be met: DIR/snapshot.pickle,
          DIR/oom.pickle, and the allocator's own counters in DIR/snapshot.json
fit       the largest batch that `explain --memory-limit` predicted, and one more, under that limit;
          if the prediction is off, the batches around it until the true one is found

Needs torch and the standard library only; nothing is predicted here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
from torch.nn import functional

from stepscope.bench.workload import Config
from stepscope.bench.workloads.language_models import GPT2

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGS = ("fp32:2", "fp32:4", "fp32:8", "bf16:4", "bf16:8")
WAIT, WARMUP, ACTIVE, STEPS = 6, 1, 1, 14
MOST_TRIES = 6  # batches tried above or below a wrong prediction


class Training:
    """One model, one optimizer, the same batch in every step."""

    def __init__(self, options: argparse.Namespace, batch: int, dtype: str) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        sizes = {name: getattr(options, name) for name in ("layers", "width", "length")}
        sizes |= {"heads": options.width // 64, "words": options.vocabulary}
        self.model = GPT2(Config(sizes)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._ids = torch.randint(
            0, options.vocabulary, (batch, options.length + 1), device=self.device
        )
        self._narrow = dtype == "bf16"

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self._narrow):
            logits = self.model(self._ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), self._ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()

    def held(self) -> dict[str, int]:
        """Bytes that the script itself can count; a storage counts once."""
        parameters = list(self.model.parameters())
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.device.type == self.device
        ]
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes([p.grad for p in parameters if p.grad is not None]),
            "optimizer": _bytes(states),
            "buffers": _bytes(list(self.model.buffers())),
        }


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main() -> None:
    options = _options()
    options.act(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    train = _verb(verbs, "train", _train_all)
    train.add_argument("configs", nargs="*", default=CONFIGS)
    train.add_argument("--out", type=Path, required=True)
    one = _verb(verbs, "one", _train_one)
    one.add_argument("config")
    one.add_argument("--out", type=Path, required=True)
    snapshot = _verb(verbs, "snapshot", _snapshot)
    snapshot.add_argument("--out", type=Path, required=True)
    fit = _verb(verbs, "fit", _fit)
    fit.add_argument("--limit", type=float, required=True, help="bytes torch may reserve")
    fit.add_argument("--largest", type=int, required=True, help="what was predicted")
    fit.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    return parser.parse_args()


def _verb(verbs: Any, name: str, act: Callable[[argparse.Namespace], None]) -> Any:
    parser = verbs.add_parser(name)
    parser.set_defaults(act=act)
    for size, value in (("layers", 12), ("width", 768), ("length", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{size}", type=int, default=value)
    return parser


def _train_all(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = [
        word
        for name in ("layers", "width", "length", "vocabulary")
        for word in (f"--{name}", str(getattr(options, name)))
    ]
    truth = {}
    for config in options.configs:
        name = config.replace(":", "-b")
        done = subprocess.run(
            [sys.executable, __file__, "one", config, "--out", options.out / name, *sizes],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        truth[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, json.dumps(truth[name]), flush=True)
        (options.out / "truth.json").write_text(json.dumps(truth, indent=1))


def _train_one(options: argparse.Namespace) -> None:
    from stepscope.measure.hooks import install
    from stepscope.measure.session.session import Session
    from stepscope.measure.settings import Settings

    dtype, _, batch = options.config.partition(":")
    shutil.rmtree(options.out, ignore_errors=True)
    settings = Settings(
        folder=str(options.out), wait=WAIT, warmup=WARMUP, active=ACTIVE, sample_hz=0
    )
    session = Session(settings)
    install(session)
    training = Training(options, int(batch), dtype)
    peak = None
    for number in range(STEPS):
        if number == 2 and training.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the first steps created the optimizer's state
        if number == WAIT - 1:
            peak = _peak(training)
        training.step()
    measured = {
        "dtype": dtype,
        "batch": int(batch),
        "peak_plain_steps": peak,
        "peak_all_steps": _peak(training),
        **training.held(),
    }
    if training.device == "cuda":
        measured["reserved"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        measured["outside_torch"] = total - free - torch.cuda.memory_reserved()
        measured["device_bytes"] = total
    session.close()
    print(json.dumps(measured))


def _peak(training: Training) -> int | None:
    return torch.cuda.max_memory_allocated() if training.device == "cuda" else None


def _snapshot(options: argparse.Namespace) -> None:
    _need_cuda()
    options.out.mkdir(parents=True, exist_ok=True)
    small = argparse.Namespace(layers=2, width=256, length=128, vocabulary=1000)
    training = Training(small, 8, "fp32")
    training.step()
    torch.cuda.memory._record_memory_history(max_entries=4000, stacks="python")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    counters = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }
    torch.cuda.memory._dump_snapshot(str(options.out / "snapshot.pickle"))
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.empty(10**13, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._dump_snapshot(str(options.out / "oom.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    counters |= {
        f"{name}_file_bytes": (options.out / f"{name}.pickle").stat().st_size
        for name in ("snapshot", "oom")
    }
    (options.out / "snapshot.json").write_text(json.dumps(counters))
    print(json.dumps(counters))


def _fit(options: argparse.Namespace) -> None:
    _need_cuda()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(options.limit / total)
    tried: dict[int, bool] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = batch > 0 and _runs(options, batch)
            print(f"batch {batch}: {'fits' if tried[batch] else 'out of memory'}", flush=True)
        return tried[batch]

    fits(options.largest)
    fits(options.largest + 1)
    largest = options.largest
    while not fits(largest) and options.largest - largest < MOST_TRIES:
        largest -= 1
    while fits(largest) and fits(largest + 1) and largest - options.largest < MOST_TRIES:
        largest += 1
    measured = {
        "predicted": options.largest,
        "fitted": fits(options.largest),
        "one_more_fitted": fits(options.largest + 1),
        "true_largest": largest if fits(largest) and not fits(largest + 1) else None,
    }
    print(json.dumps(measured))


def _runs(options: argparse.Namespace, batch: int) -> bool:
    """Three steps: the second is the first that begins with the optimizer's state."""
    training: Training | None = None
    try:
        training = Training(options, batch, options.dtype)
        for _ in range(3):
            training.step()
        torch.cuda.synchronize()
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        del training
        gc.collect()
        torch.cuda.empty_cache()


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")


if __name__ == "__main__":
    main()
