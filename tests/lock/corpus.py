"""The inputs whose answers are held, and what is asked about each."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "golden"
RUNS = Path(__file__).parent / "runs"
SCRIPTS = Path(__file__).parent / "scripts"
SHARED = TESTS.parent.parent / "shared/traces"
SETTINGS_OF = (
    "h200-resnet18",
    "cpu_step.json.gz",
    "cuda_step.json.gz",
    "ddp",
    "gpt2s_b8_bf16.json.gz",
)


@dataclass(frozen=True)
class Question:
    name: str
    folder: Path  # where the command runs: answers name inputs as they were typed
    arguments: tuple[str, ...]
    columns: int = 100


def questions(scratch: Path) -> Iterator[Question]:
    """Yield every question about every input; damaged inputs are written into `scratch`."""
    for group, folder, inputs in groups(scratch):
        for one in inputs:
            yield from about(f"{group}/{one}", folder, one)
        for first, second in pairwise(inputs):
            name = f"{group}/{first}/compare-{second}"
            yield Question(name, folder, ("compare", first, second, "--json", "--no-cache"))
    for arguments in (("whatif", "--list"), ("tune", "--list"), ("run", "--with", "list")):
        yield Question(f"changes/{arguments[0]}", scratch, arguments)
    for verb in ("whatif", "tune"):
        yield Question(f"changes/{verb}-json", scratch, (verb, "--list", "--json"))
    for change in changes():
        yield Question(f"changes/why-{change}", scratch, ("why", change))
    for script in sorted(SCRIPTS.iterdir()):
        for device in ("cpu", "cuda"):
            yield Question(f"patch/{script.stem}-{device}", scratch, ("patch", str(script), device))


def groups(scratch: Path) -> Iterator[tuple[str, Path, list[str]]]:
    yield "golden", GOLDEN, names(GOLDEN)
    yield "runs", RUNS, names(RUNS)
    yield "damaged", damage(scratch / "damaged"), names(scratch / "damaged")
    for folder in sorted(SHARED.glob("*")):
        if folder.is_dir():
            yield f"shared/{folder.name}", folder, [n for n in names(folder) if "truth" not in n]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def about(name: str, folder: Path, one: str) -> Iterator[Question]:
    for columns in (80, 120):
        wide = f"{name}/explain-{columns}"
        yield Question(wide, folder, ("explain", one, "--no-cache"), columns)
        yield Question(f"{wide}-full", folder, ("explain", one, "--no-cache", "--full"), columns)
    yield Question(f"{name}/explain-json", folder, ("explain", one, "--no-cache", "--json"))
    page = ("explain", one, "--no-cache", "--html", "PAGE")
    yield Question(f"{name}/explain-html", folder, page)
    yield Question(f"{name}/whatif", folder, ("whatif", one, "--no-cache"))
    yield Question(f"{name}/whatif-json", folder, ("whatif", one, "--no-cache", "--json"))
    yield Question(f"{name}/gpus-json", folder, ("whatif", one, "--gpus", "--no-cache", "--json"))
    if one in SETTINGS_OF:
        for setting in usual_settings():
            words = ("whatif", one, "--no-cache", "--json", "--set", setting)
            yield Question(f"{name}/whatif-{setting}", folder, words)


def changes() -> list[str]:
    from stepscope.changes import APPLIED_AS, CHANGES

    return sorted({*CHANGES, *APPLIED_AS})


def usual_settings() -> list[str]:
    from stepscope.changes import PREDICTED

    more = ["workers=8", "hosts=2", "zero=1", "latency=2", "gpu=H100 SXM", "fuse=8", "accumulate=4"]
    return more + [
        f"{name}={value}" if value else name
        for name, change in PREDICTED.items()
        for value in change.usual or ([""] if not change.takes_value else [])
    ]


def damage(folder: Path) -> Path:
    """Write copies of good inputs that are cut, incomplete or wrong."""
    folder.mkdir()
    trace = (GOLDEN / "cuda_step.json.gz").read_bytes()
    text = gzip.decompress(trace)
    (folder / "cut.json").write_bytes(text[: len(text) * 2 // 3])
    (folder / "cut.json.gz").write_bytes(trace[: len(trace) // 2])
    (folder / "empty.json").write_bytes(b"")
    (folder / "list.json").write_bytes(b"[1, 2, 3]")
    (folder / "text.json").write_bytes(b"no trace")
    (folder / "no-events.json").write_bytes(b'{"traceEvents": []}')
    (folder / "no-cuda.json").write_bytes(text.replace(b"cuda_runtime", b"cuda_nothing"))
    (folder / "no-steps.json").write_bytes(text.replace(b"ProfilerStep#", b"Something"))
    for missing in ("trace.json.gz", "steps.jsonl", "memory.json", "rank.json", "samples.json"):
        run = folder / f"without-{missing.partition('.')[0]}"
        shutil.copytree(GOLDEN / "h200-resnet18", run)
        (run / "rank-00000" / missing).unlink(missing_ok=True)
    for broken in ("steps.jsonl", "memory.json", "rank.json"):
        run = folder / f"broken-{broken.partition('.')[0]}"
        shutil.copytree(GOLDEN / "h200-resnet18", run)
        file = run / "rank-00000" / broken
        file.write_bytes(file.read_bytes()[:-200] + b"\x00{{")
    run = folder / "one-rank-lost"
    shutil.copytree(GOLDEN / "cpu-two-ranks", run)
    shutil.rmtree(run / "rank-00001")
    return folder
