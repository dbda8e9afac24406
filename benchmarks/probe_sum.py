"""Is the sum of probed operators what the trace says? `--save FILE.json` keeps each row at once.

    PYTHONPATH=src python3 benchmarks/probe_sum.py --seconds 300 --save probe.json [--tiny]

Each model is trained for a few steps under `stepscope run`, then probed in its own precision and in
bf16: the difference of the sums, the share that was timed, what autocast costs the host, and the
host's own time of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library_turn import FOLDER_VARIABLE, Turns

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOP = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
{build}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(30):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16, enabled={autocast}):
        loss = run(model)
    loss.backward()
    optimizer.step()
"""
_GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer={layers}, n_positions={length})).to(device)
tokens = torch.randint(0, 50257, ({batch}, {length}), device=device)
run = lambda model: model(tokens, labels=tokens).loss
"""
_CONVNEXT = """
from torchvision.models import convnext_tiny
model = convnext_tiny().to(device)
images = torch.randn({batch}, 3, {side}, {side}, device=device)
labels = torch.zeros({batch}, dtype=torch.long, device=device)
run = lambda model: torch.nn.functional.cross_entropy(model(images), labels)
"""
_MLP = """
layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
model = torch.nn.Sequential(*layers).to(device)
values = torch.randn(32, 64, device=device)
run = lambda model: model(values).square().mean()
"""


def workloads(*, tiny: bool) -> dict[str, str]:
    """Scripts by name, the most telling first."""
    if tiny:
        return {"mlp fp32": _LOOP.format(build=_MLP, autocast=False)}
    gpt2 = _GPT2.format(layers=12, length=1024, batch=8)
    convnext = _CONVNEXT.format(batch=64, side=224)
    return {
        f"{name} {precision}": _LOOP.format(build=build, autocast=precision == "bf16")
        for name, build in (("gpt2", gpt2), ("convnext-tiny", convnext))
        for precision in ("fp32", "bf16")
    }


def measure(script: str) -> dict[str, Any]:
    """One row; what fails is in it."""
    with tempfile.TemporaryDirectory() as home:
        file, out = Path(home) / "train.py", Path(home) / "run"
        file.write_text(script)
        environment = {**os.environ, "STEPSCOPE_LIBRARY": home}
        options = ["--out", str(out), "--no-explain", "--probe", "--set", "precision=bf16"]
        command = [
            sys.executable,
            "-m",
            "stepscope",
            "run",
            *options,
            "--",
            sys.executable,
            str(file),
        ]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        if not (out / "probe.json").exists():
            return {"error": (ended.stderr or "no report").strip()[-600:]}
        report = json.loads((out / "probe.json").read_text())
        rank = json.loads((out / "rank-00000" / "rank.json").read_text())
    kept = ("difference", "probed_share", "same_traced_ms", "same_probed_ms", "wall_s")
    row = {name: report[name] for name in (*kept, "host_added_ms", "place", "software")}
    row["unprobed"] = report["unprobed"][:5]
    row["worst"] = sorted(
        (operator for operator in report["operators"] if operator["probed_ms"] is not None),
        key=lambda operator: -abs(operator["probed_ms"] - operator["traced_ms"]),
    )[:8]
    row["host_steps"] = rank.get("host_steps")
    return row


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have the device alone where others take turns on it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        yield
        return
    turns = Turns(Path(folder))
    turns.enter()
    with turns.alone():
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    rows: dict[str, Any] = json.loads(options.save.read_text()) if options.save.exists() else {}
    ends = time.monotonic() + options.seconds
    for name, script in workloads(tiny=options.tiny).items():
        if "difference" in rows.get(name, ()) or time.monotonic() > ends:
            continue  # a row that failed is tried again
        try:
            with alone():
                rows[name] = measure(script)
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"}
        options.save.write_text(json.dumps(rows, indent=1))
        row = rows[name]
        if "error" in row:
            print(f"{name}: {row['error']}", flush=True)
        else:
            print(f"{name}: {describe(row)}", flush=True)


def describe(row: dict[str, Any]) -> str:
    sums = f"traced {row['same_traced_ms']:.2f} ms, probed {row['same_probed_ms']:.2f} ms"
    share = f"{100 * row['probed_share']:.1f}% timed in {row['wall_s']:.1f} s"
    if row["difference"] is None:
        return f"nothing timed, {share}"
    return f"{sums} ({100 * row['difference']:+.1f}%), {share}"


if __name__ == "__main__":
    main()
