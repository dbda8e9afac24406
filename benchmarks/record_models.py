"""Record workloads as ../shared/traces/h200 was recorded: traces and measured steps.

    python benchmarks/record_models.py --out DIR WORKLOAD:CONFIG[,CONFIG...] ...

A workload is one of `stepscope bench`. A config is words joined by "-": fp32, tf32 or bf16;
foreach, fused or loop; graph; ckpt (every block computed twice); x2 (twice the batch). Words left
out are fp32 and the workload's own. A `+` after it also records a trace of three steps. All
configurations of a workload take turns, block by block, so that drift is not mistaken for a
difference between them. Writes DIR/truth.json and DIR/<workload>_<config>.json.gz.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from forked_training import (
    TrainingFailedError,
    Way,
    forked,
    measure_in_turns,
    middle,
)
from library_turn import Turns
from stepscope.bench.workload import SIZES

if TYPE_CHECKING:
    from forked_training import ForkedTraining

ROUNDS, SYNCED, TRACED = 6, 8, 3
REMEDIES = {
    "tf32": "tf32",
    "bf16": "bf16",
    "fused": "fused-optimizer",
    "ckpt": "activation-checkpointing",
}
WORDS = (*REMEDIES, "fp32", "foreach", "loop", "graph", "x2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("wanted", nargs="+")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    truth: dict[str, Any] = {}
    for wanted in options.wanted:
        name, _, configs = wanted.partition(":")
        began = time.perf_counter()
        truth |= _record(name, configs.split(","), options)
        (options.out / "truth.json").write_text(json.dumps(truth, indent=1))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def way_of(config: str) -> Way:
    """ValueError for a word that there is not."""
    words = set(config.split("-"))
    if unknown := sorted(words - set(WORDS)):
        raise ValueError(
            f"{config}: there is no {', '.join(unknown)}; words are {', '.join(WORDS)}"
        )
    update = {"foreach": {"foreach": True}, "loop": {"foreach": False}}
    return Way(
        remedies=tuple(remedy for word, remedy in REMEDIES.items() if word in words),
        batches=2 if "x2" in words else 1,
        optimizer=next((update[word] for word in update if word in words), {}),
        graph="graph" in words,
    )


def _record(name: str, configs: list[str], options: argparse.Namespace) -> dict[str, Any]:
    try:
        ways = {config.rstrip("+"): way_of(config.rstrip("+")) for config in configs}
    except ValueError as problem:
        sys.exit(str(problem))
    truth: dict[str, Any] = {}
    with forked(name, options.size, options.device, list(ways.values())) as trainings:
        built: dict[str, ForkedTraining] = {}
        for config, training in zip(ways, trainings, strict=True):
            try:
                training.build()
                built[config] = training
            except TrainingFailedError as problem:
                print(f"{name} {config}: left out: {problem}", flush=True)
        with tempfile.TemporaryDirectory() as turns:
            blocks = measure_in_turns(list(built.values()), Turns(Path(turns)), ROUNDS)
        for (config, training), its_blocks in zip(built.items(), blocks, strict=True):
            truth[f"{name}_{config}"] = _measured(ways[config], training, its_blocks)
        # Traces come last: the profiler slows the driver for good.
        for config, training in built.items():
            if f"{config}+" in configs:
                training.profile(options.out / f"{name}_{config}.json.gz", TRACED)
    return truth


def _measured(way: Way, training: ForkedTraining, blocks_ms: list[float]) -> dict[str, Any]:
    peak = training.peak_bytes()
    steps = training.synced(SYNCED)
    phases = {
        phase: statistics.median(host[phase] for _, host in steps) * 1e3
        for phase in ("forward", "backward", "optimizer")
    }
    return {
        "step_ms_synced": statistics.median(seconds for seconds, _ in steps) * 1e3,
        "step_ms_pipelined": middle(blocks_ms),
        "blocks_ms": [round(block, 4) for block in blocks_ms],
        "host_ms": None if way.graph else phases,
        "peak_alloc": peak,
        "batch": training.facts().batch,
        "remedies": way.remedies,
        "graph": way.graph,
    }


if __name__ == "__main__":
    main()
