"""Whether library models train the same to the last bit with save_memory.

    python benchmarks/save_memory_exact.py --save exact.json [--seconds 300] [--models vit,swin]

Each model trains from one seed four times: as it is, as it is once more (the control), with the
plan that keeps least, and with one that may repeat products, too. Losses of every step and all
parameters, gradients and buffers at the end are compared, under torch's deterministic algorithms.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import numpy
import torch

sys.path.append(str(Path(__file__).parent.parent / "src"))

from save_memory_rows import measure_rows
from stepscope.fix import save_memory

if TYPE_CHECKING:
    from save_memory_rows import Row

FOLDER = Path(__file__).parent / "library_models"
STEPS, BATCH = 8, 4
SAME, NOT_REPEATED = "same", "plain training differs from itself"
PRECISIONS = ("fp32", "bf16", "bf16, channels last")
WAYS: dict[str, dict[str, Any]] = {"least": {}, "heavy": {"heavy": True}}


def main() -> None:
    options = _options()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    names = options.models.split(",") if options.models else _all_names()
    cells = [
        {"model": name, "precision": precision}
        for precision in options.precisions.split(";")
        for name in names
    ]
    rows = measure_rows(
        cells,
        lambda cell: compared(cell, options.device, tiny=options.tiny),
        path=options.save,
        seconds=options.seconds,
    )
    print(summary(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="start no row after this")
    parser.add_argument("--models", default="", help="separated by commas; all of library_models")
    parser.add_argument("--precisions", default=";".join(PRECISIONS), help="separated by ;")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, also for CPUs")
    return parser.parse_args()


def _all_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def compared(cell: Row, device: str, *, tiny: bool) -> Row:
    """What differs from plain training, and how much less is kept."""
    plain, control = (_trained(cell, device, None, tiny=tiny)[0] for _ in range(2))
    row: Row = {"control": SAME if _same(plain, control) else NOT_REPEATED}
    for way, options in WAYS.items():
        seen, plan, notes = _trained(cell, device, options, tiny=tiny)
        row[way] = SAME if _same(plain, seen) else "differs"
        row[f"{way} saved"] = plan and round(plan.saved_bytes_before / max(1, plan.saved_bytes), 2)
        row[f"{way} notes"] = notes
    return row


def _trained(
    cell: Row, device: str, options: dict[str, Any] | None, *, tiny: bool
) -> tuple[dict[str, torch.Tensor], Any, list[str]]:
    _clean(device)
    training = importlib.import_module(f"library_models.{cell['model']}")
    _seed()
    model = training.build(tiny).to(device)
    if "channels last" in cell["precision"]:
        model = model.to(memory_format=torch.channels_last)
    batches = training.make_batches(BATCH, device, tiny)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    saver = None if options is None else save_memory(model, **options)
    seen: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with _autocast(cell["precision"], device):
            loss = training.loss_of(model, batches[0])
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach().cpu()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        seen[name] = value.detach().cpu()
        if value.grad is not None:
            seen[f"gradient of {name}"] = value.grad.cpu()
    plan = None if saver is None else saver.plan
    return seen, plan, [] if saver is None else list(saver.notes)


def _seed() -> None:
    """Some models draw masks with numpy, or leave out layers with Python's own random numbers."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _autocast(precision: str, device: str) -> Any:
    if not precision.startswith("bf16"):
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0))
        if one[name].is_floating_point()
        else torch.equal(one[name], other[name])
        for name in one
    )


def _clean(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def summary(rows: list[Row]) -> str:
    measured = [row for row in rows if "error" not in row]
    comparable = [row for row in measured if row["control"] == SAME]
    lines = [f"{len(measured)} rows, {len(comparable)} of them repeat without a plan"]
    for way in WAYS:
        same = sum(row[way] == SAME for row in comparable)
        lines.append(f"{way}: {same} of {len(comparable)} the same to the last bit")
    lines += [
        f"{row['model']} {row['precision']}: {row['error'][:120]}" for row in rows if "error" in row
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
