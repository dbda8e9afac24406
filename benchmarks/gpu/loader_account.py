"""stepscope against the meters of a training script: resnet_loader.py under `stepscope run`.

    python benchmarks/gpu/loader_account.py FOLDER [--check] [-- OPTIONS of resnet_loader.py]
    python benchmarks/gpu/loader_account.py FOLDER --capture-only      needs torch alone
    python benchmarks/gpu/loader_account.py FOLDER --explain-only      on any machine, later

FOLDER gets `run`, the run folder, and `truth.json`, what the script's own meters read. Targets: the
mean step within 2% of batch_time; waiting for data, validation and checkpoints within 5% of what
the script measured; an account that adds up. `--check` exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src"
SCRIPT = Path(__file__).parent / "resnet_loader.py"
NEEDED = ("click", "msgspec")  # by `stepscope run`


def main() -> None:
    options = _options()
    if not options.explain_only:
        capture(options.folder, options.arguments)
    if not options.capture_only:
        is_good = compare(options.folder)
        sys.exit(options.check and not is_good)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capture-only", action="store_true")
    parser.add_argument("--explain-only", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("arguments", nargs="*", help="of resnet_loader.py")
    return parser.parse_args()


# Capture


def capture(folder: Path, arguments: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run, truth = folder.absolute() / "run", folder.absolute() / "truth.json"
    command = [sys.executable, str(SCRIPT), "--save", str(truth), *arguments]
    if all(importlib.util.find_spec(name) for name in NEEDED):
        ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(run), "--"]
        subprocess.run([*ours, *command], check=True, env=_with_path(SOURCE))
    else:
        _capture_alone(run, command)


def _with_path(*folders: Path) -> dict[str, str]:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def _capture_alone(run: Path, command: list[str]) -> None:
    """What `stepscope run` does, with the standard library: capture needs nothing else."""
    run.mkdir()
    environment = _with_path(SOURCE / "stepscope/measure/inject", SOURCE)
    environment["STEPSCOPE_CAPTURE"] = json.dumps({"folder": str(run)})
    facts: dict[str, Any] = {"schema": 1, "command": command, "started_unix": time.time()}
    code = subprocess.run(command, env=environment).returncode
    facts |= {"ended_unix": time.time(), "exit_code": code, "status": "finished"}
    facts["ranks"] = [
        json.loads(path.read_text()) | {"folder": path.parent.name}
        for path in sorted(run.glob("rank-*/rank.json"))
    ]
    (run / "run.json").write_text(json.dumps(facts))
    if code:
        raise SystemExit(f"{command} ended with exit code {code}")


# Comparison


def compare(folder: Path) -> bool:
    """Print one row per number; whether all targets are met."""
    truth = json.loads((folder / "truth.json").read_text())
    explained = _explain(folder / "run")
    (rank,) = explained["run"]["ranks"]
    places = _steady_steps(folder / "run" / "rank-00000", rank["warm_up"])
    is_good = len(truth["batch_ms"]) == rank["steps"]
    print(f"{truth['device']}: {rank['steps']} steps, {len(places)} of them steady")
    print(f"verdict: {explained['verdict']}\n  {explained['why']}")
    for row in (*_step_rows(truth, explained, places), *_account_rows(truth, rank)):
        is_good &= _print_row(*row)
    whole = rank["account"]["wall_ms"]
    parts = sum(part["ms"] for part in rank["account"]["parts"])
    print(f"account: {parts:.3f} of {whole:.3f} ms, goodput {rank['account']['goodput']:.3f}")
    for stall in rank["stalls"]:
        print("stall:", {name: stall[name] for name in ("cause", "steps", "cost_ms", "period")})
    print("findings:", *(finding["id"] for finding in explained["findings"]))
    return is_good and abs(parts - whole) < 1e-3


def _explain(run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "stepscope", "explain", "--json", str(run)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=_with_path(SOURCE))
    explained: dict[str, Any] = json.loads(done.stdout)
    return explained


def _steady_steps(rank_folder: Path, warm_up: int) -> list[int]:
    """The steps that stepscope's mean is of, so that the script's meters are read at the same."""
    sys.path.insert(0, str(SOURCE))
    from stepscope.trace.decode import Oddities
    from stepscope.trace.run_folder.step_files import read_step_columns

    steps = read_step_columns(rank_folder, Oddities("steps"))
    assert steps is not None
    return [place for place in steps.plain.nonzero()[0].tolist() if place >= warm_up]


Row = tuple[str, float, float, float]  # what, stepscope's ms, the script's ms, the target


def _step_rows(truth: dict[str, Any], explained: dict[str, Any], places: list[int]) -> list[Row]:
    step = explained["ranks"][0]["step_ms"]
    budget = {part["id"]: part["ms"] for part in explained["budget"]["parts"]}
    waits = budget.get("stall_data", 0.0) + budget["data_loading"]
    return [
        ("mean step", step["mean"], _mean_at(truth["batch_ms"], places), 0.02),
        ("budget's step", explained["budget"]["step_ms"], step["mean"], 1e-6),
        ("waiting for data, per step", waits, _mean_at(truth["data_ms"], places), 0.05),
    ]


def _account_rows(truth: dict[str, Any], rank: dict[str, Any]) -> list[Row]:
    account = {part["id"]: part["ms"] for part in rank["account"]["parts"]}
    inside = sum(account[name] for name in ("first_steps", "training", "windows"))
    first_batch = _inner(rank, "start_up", "first_batch")
    return [
        ("evaluation", account["evaluation"], sum(truth["validate_ms"]), 0.05),
        ("checkpoint", account["checkpoint"], sum(truth["save_ms"]), 0.05),
        ("all steps", inside + first_batch, sum(truth["batch_ms"]), 0.05),
    ]


def _inner(rank: dict[str, Any], name: str, inner: str) -> float:
    (part,) = (part for part in rank["account"]["parts"] if part["id"] == name)
    return sum(item["ms"] for item in part["parts"] if item["id"] == inner)


def _mean_at(values: list[float], places: list[int]) -> float:
    return sum(values[place] for place in places) / len(places)


def _print_row(name: str, ours: float, theirs: float, target: float) -> bool:
    apart = ours / theirs - 1 if theirs else float(ours != theirs)
    is_good = abs(apart) <= target
    verdict = "ok" if is_good else f"MISSED ({target:.0%})"
    print(f"  {name:28s} {ours:12.3f} ms   script {theirs:12.3f} ms   {apart:+8.2%}  {verdict}")
    return is_good


if __name__ == "__main__":
    main()
