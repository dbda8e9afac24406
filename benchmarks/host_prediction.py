"""Promised against delivered: steps on other numbers of hosts, predicted from a run on two.

    python benchmarks/host_prediction.py                       2 hosts -> 1 and 4, one rank on each
    python benchmarks/host_prediction.py --ranks 2 --rate 400mbit --to 4

Hosts are namespaces of this machine with shaped links (tests/hosts/lab.py; needs root). Ranks pause
instead of computing, because they share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/hosts"))

from lab import Lab, why_not  # noqa: E402  (a folder of tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--to", type=int, nargs="+", default=[1, 4], help="hosts to predict")
    parser.add_argument("--from-hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--work-ms", type=int, default=60)
    options = parser.parse_args()
    if reason := why_not():
        print(f"no hosts here: {reason}", file=sys.stderr)
        return 4
    with tempfile.TemporaryDirectory(prefix="host-prediction-") as name:
        folder = Path(name)
        known = record(folder / "known", options.from_hosts, options)
        now = explain(known)
        print(f"{options.from_hosts} hosts: {now['budget']['step_ms']:.1f} ms")
        for hosts in options.to:
            promised = predict(known, hosts)
            delivered = explain(record(folder / f"on-{hosts}", hosts, options))
            print(compare(hosts, promised, delivered["budget"]["step_ms"]), flush=True)
    return 0


def record(folder: Path, hosts: int, options: argparse.Namespace) -> Path:
    """One run on so many hosts; each host's part, put together in `folder`."""
    environment = {
        "STEPS": str(options.steps), "WIDTH": str(options.width), "WORK_MS": str(options.work_ms),
    }  # fmt: skip
    parts = {f"node{place}": folder.with_name(f"{folder.name}-{place}") for place in range(hosts)}
    around = {
        name: [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(part), "--"]
        for name, part in parts.items()
    }
    with Lab(hosts=hosts) as lab:
        for name in lab.hosts:
            lab.shape(name, options.rate)
        script = [str(ROOT / "tests/hosts/train.py")]
        job = lab.torchrun(script, ranks=options.ranks, env=environment, around=around)
        for name, process in job.items():
            outcome = process.wait()
            if outcome.code:
                raise RuntimeError(f"{name} ended with {outcome.code}:\n{outcome.stderr[-3000:]}")
    folder.mkdir()
    for place, part in enumerate(parts.values()):
        for path in part.iterdir():
            if path.name.startswith("rank-") or (not place and path.name == "run.json"):
                shutil.move(path, folder / path.name)
    return folder


def explain(folder: Path) -> dict[str, Any]:
    return stepscope("explain", str(folder), "--json")


def predict(folder: Path, hosts: int) -> dict[str, Any]:
    return stepscope("whatif", str(folder), "--set", f"hosts={hosts}", "--json", may_refuse=True)


def stepscope(*arguments: str, may_refuse: bool = False) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode == 4 and may_refuse:
        return {"refused": done.stderr.strip()}
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def compare(hosts: int, promised: dict[str, Any], delivered_ms: float) -> str:
    if "predicted_ms" not in promised:
        return f"{hosts} hosts: delivered {delivered_ms:.1f} ms, refused: {promised['refused']}"
    ms, low, high = (promised[name] for name in ("predicted_ms", "low_ms", "high_ms"))
    inside = "inside" if low <= delivered_ms <= high else "outside"
    return (
        f"{hosts} hosts: promised {ms:.1f} ms ({low:.1f} to {high:.1f}), delivered "
        f"{delivered_ms:.1f} ms, ratio {ms / delivered_ms:.3f}, {inside}"
    )


if __name__ == "__main__":
    sys.exit(main())
