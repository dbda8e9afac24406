"""What capture costs a compiled training: the same bits and cache hits, and how much longer.

    python benchmarks/compile_overhead.py [--model lstm] [--rounds 4] [--steps 60] [--cold]

Runs with and without `stepscope run` take turns. Each starts with a compile cache of its own (cold)
or with what its first run left (warm). Every run prints its losses, dynamo's and Inductor's counts
of graphs, cache hits and misses, the seconds of compiling, and the median step before the
profiler's window. On a machine that others use, the processor's own time is the steadier measure:
of all threads and, for the first step, of the processes that compile. Exit code 1 if losses or
counts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
SAME = ("losses", "counts")
_WARM = 5  # steps before any is timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="lstm")
    parser.add_argument("--rounds", type=int, default=4, help="even: each kind begins as often")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cold", action="store_true", help="an empty cache for every run")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--explain", action="store_true", help="what was captured of the compiler")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _train(options)
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, list[dict[str, Any]]] = {"bare": [], "ours": []}
        for number in range(options.rounds):
            for kind in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
                runs[kind].append(_run(kind, number, Path(folder), options))
                print(kind, _short(runs[kind][-1]), flush=True)
        if options.explain:
            print(_explained(Path(folder, "run-0")))
    if options.save:
        options.save.write_text(json.dumps(runs, indent=1))
    return _compare(runs)


def _run(kind: str, number: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    cache = folder / (f"cache-{kind}-{number}" if options.cold else f"cache-{kind}")
    own = [sys.executable, __file__, "--worker", "--model", options.model]
    own += ["--steps", str(options.steps)]
    if kind == "ours":
        out = folder / f"run-{number}"
        window = ["--wait", str(options.steps - 8), "--warmup", "2", "--active", "3"]
        ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out)]
        own = [*ours, *window, "--repeat", "1", "--", *own]
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",  # threads that spin for others would count as the processor's time
    }
    done = subprocess.run(own, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr[-800:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _train(options: argparse.Namespace) -> int:
    import torch
    from torch._dynamo.utils import compilation_time_metrics, counters

    from compiled_models import MODELS

    torch.manual_seed(0)
    model, batch = MODELS[options.model](tiny=not torch.cuda.is_available())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = model.to(device), tuple(one.to(device) for one in batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compiled = torch.compile(model)
    losses, steps_ms, steps_cpu_ms = [], [], []
    for _ in range(options.steps):
        began, began_cpu = time.perf_counter(), _cpu_s()
        optimizer.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        steps_ms.append(1e3 * (time.perf_counter() - began))
        steps_cpu_ms.append(1e3 * (_cpu_s() - began_cpu))
    times = compilation_time_metrics
    kinds = ("inductor", "aot_autograd", "stats", "frames")
    facts = {
        "losses": losses,
        "counts": {kind: dict(sorted(counters[kind].items())) for kind in kinds},
        "compile_s": sum(times.get("_compile.compile_inner", []))
        + sum(times.get("compile_fx.<locals>.bw_compiler", [])),
        "first_step_s": steps_ms[0] / 1e3,
        "first_step_cpu_s": steps_cpu_ms[0] / 1e3,
        "step_cpu_ms": statistics.median(steps_cpu_ms[_WARM : options.steps - 10]),
        "step_ms": statistics.median(steps_ms[_WARM : options.steps - 10]),
        "quick_ms": sorted(steps_ms[_WARM : options.steps - 10])[options.steps // 10],
    }
    print(json.dumps(facts))
    return 0


def _cpu_s() -> float:
    """Of this process, and of the compilers that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _explained(out: Path) -> str:
    import torch

    from stepscope.explain.explain_job import explain_job

    work = explain_job(out, cache=False).ranks[0].compiled
    if work is None:
        return f"torch {torch.__version__}: nothing compiled was seen"
    graphs = f"{len(work.regions)} graphs, {sum(one.captured for one in work.regions)} captured"
    notes = "; ".join(work.notes) or "nothing is missing"
    return f"torch {torch.__version__}: {work.compilations} compilations, {graphs}; {notes}"


def _short(run: dict[str, Any]) -> str:
    return (
        f"compile {run['compile_s']:.2f} s, first step {run['first_step_s']:.2f} s, "
        f"{run['first_step_cpu_s']:.2f} s of the processor, step {run['step_ms']:.3f} ms "
        f"(quick ones {run['quick_ms']:.3f}), {run['step_cpu_ms']:.3f} ms of the processor"
    )


def _compare(runs: dict[str, list[dict[str, Any]]]) -> int:
    bare, ours = runs["bare"], runs["ours"]
    pairs = list(zip(bare, ours, strict=True))
    same = all(a[name] == b[name] for a, b in pairs for name in SAME)
    print(f"losses, graphs and cache hits: {'the same' if same else 'DIFFERENT'}")
    for name, words in (
        ("compile_s", "compile time"),
        ("first_step_s", "first step"),
        ("step_ms", "median step outside the window"),
        ("quick_ms", "quick steps outside the window"),
        ("first_step_cpu_s", "first step, the processor's time"),
        ("step_cpu_ms", "median step outside the window, the processor's time"),
    ):
        ratios = sorted(b[name] / a[name] for a, b in pairs if a[name])
        if ratios:
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            print(f"{words}: {statistics.median(ratios):.3f} times ({spread})")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
