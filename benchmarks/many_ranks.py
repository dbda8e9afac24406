"""A job of many ranks: how long `explain` takes, and how much memory it and its workers need.

    python benchmarks/many_ranks.py [--ranks 1024] [--form json|gz] [--engine pool|ray] [--check]
    python benchmarks/many_ranks.py --form run [--ranks 10000] [--source RUN] [--engine pool|ray]

Writes one trace per rank: a recording of the tests repeated end to end, with all-reduces inserted
into every step. Ranks differ in their clocks and in how long they wait in the all-reduces. One rank
is late, and all others wait for it. `json` is 1 MB of plain JSON per rank, `gz` 1 MB of gzip, which
is about 17 MB of JSON. The folder is explained twice: `--json` with an empty cache, then `--html`.

`run` is a run folder in which 64 ranks have a trace and all have steps, collectives and clock
rounds (simulated_ranks.py). It is closed as `stepscope run` does it, then explained.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from big_trace import read, repeated, split, to_ns
from process import environment, last_line
from targets import MANY_PARENT, MANY_WALL, MANY_WORKER, RANKS_TREE, RANKS_WALL, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

MEGABYTE = 1_000_000
GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
SOURCES = {
    "json": GOLDEN / "cuda_step.json.gz",
    "gz": GOLDEN / "h200-resnet18" / "rank-00000" / "trace.json.gz",
}
VARIANTS = 16
LATE_RANK = 37
_STEP = re.compile(
    rb'"user_annotation", "name": "ProfilerStep#\d+".*?"ts": ([\d.]+), "dur": ([\d.]+)', re.DOTALL
)
_BASE = re.compile(rb'"baseTimeNanoseconds": (\d+),')
_REDUCES = 6
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one command needed."""

    name: str
    wall_s: float
    cpu_s: float  # of all its processes: the wall time on one idle core
    parent_bytes: int
    worker_bytes: int  # of the largest
    output_bytes: int
    tree_bytes: int = 0  # of all its processes at once; what they share counts once


# The job


def write_job(folder: Path, form: str, ranks: int, target_bytes: int) -> tuple[int, int]:
    """Write a run folder's traces; returns the bytes of JSON and of file per rank."""
    source = read(SOURCES[form])
    ratio = 1 if form == "json" else len(source) / len(gzip.compress(source, 6))
    bodies = [body_of(source, variant, int(target_bytes * ratio)) for variant in range(VARIANTS)]
    sizes = len(bodies[0][0]) + len(bodies[0][1])
    packed = [gzip.compress(rest, 6) if form == "gz" else rest for _, rest in bodies]
    for rank in range(ranks):
        # The late rank waits for nobody.
        variant = 0 if rank == LATE_RANK else 1 + rank % (VARIANTS - 1)
        head = head_of(bodies[variant][0], rank, ranks)
        place = folder / f"rank-{rank:05d}" / ("trace.json.gz" if form == "gz" else "trace.json")
        place.parent.mkdir(parents=True)
        # A gzip file may have several members: the long one is compressed once for many ranks.
        place.write_bytes((gzip.compress(head, 1) if form == "gz" else head) + packed[variant])
    return sizes, place.stat().st_size


def body_of(source: bytes, variant: int, at_least_bytes: int) -> tuple[bytes, bytes]:
    """The text before the events, and the rest, for ranks that wait equally long."""
    head, events, tail = split(source)
    with_reduces = b",\n  ".join([*reduces(source, variant), *events])
    text = b"".join(repeated(head + with_reduces + tail, at_least_bytes))
    return text[: len(head)], text[len(head) :]


def reduces(source: bytes, variant: int) -> Iterator[bytes]:
    """All-reduces in the second half of each step, and the calls that launch them."""
    for number, (start, dur) in enumerate(_STEP.findall(source)):
        begin, length = to_ns(start), to_ns(dur)
        apart = length // (2 * _REDUCES)
        waits = apart * (2 if variant == 0 else 20 + 2 * variant) // 100
        for place in range(_REDUCES):
            ends = begin + length // 2 + (place + 1) * apart  # at the same time on all ranks
            yield from reduce_events(9_000_000 + number * _REDUCES + place, ends - waits, waits)


def reduce_events(correlation: int, at_ns: int, dur_ns: int) -> Iterator[bytes]:
    common = {"ph": "X", "pid": 0, "tid": 20}
    collective = {
        "Collective name": "allreduce",
        "In msg nelems": 6_250_000,
        "Out msg nelems": 6_250_000,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Group size": 1024,
    }
    kernel = {"device": 0, "stream": 20, "correlation": correlation, **collective}
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    yield event(common | {"cat": "kernel", "name": name}, at_ns, dur_ns, kernel)
    launch = {"ph": "X", "pid": 784, "tid": 784, "cat": "cuda_runtime"}
    call = launch | {"name": "cudaLaunchKernelExC"}
    yield event(call, at_ns - 20_000, 5_000, {"correlation": correlation})


def event(fields: dict[str, Any], at_ns: int, dur_ns: int, args: dict[str, Any]) -> bytes:
    """As Kineto writes it, with the spaces that big_trace expects."""
    text = json.dumps(fields)[:-1] + f', "ts": {us(at_ns)}, "dur": {us(dur_ns)}, "args": '
    return (text + json.dumps(args) + "}").encode()


def us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def head_of(head: bytes, rank: int, ranks: int) -> bytes:
    """This rank's metadata: its place in the job, and a clock that is up to a millisecond off."""
    info = {"backend": "nccl", "rank": rank, "world_size": ranks}
    base = int(_BASE.search(head)[1]) if _BASE.search(head) else 1_790_000_000_000_000_000
    off = (rank * 7919) % 2_000_000 - 1_000_000
    metadata = b'"distributedInfo": %s, "baseTimeNanoseconds": %d,' % (
        json.dumps(info).encode(),
        base + off,
    )
    if _BASE.search(head):
        return _BASE.sub(metadata, head)
    return head.replace(b'"traceEvents"', metadata + b' "traceEvents"', 1)


# What it needs


def measure(name: str, arguments: list[str], output: Path, env: dict[str, str]) -> Cost:
    command = [sys.executable, "-m", "stepscope", "explain", *arguments]
    peaks: dict[int, int] = {}
    together = [0]
    with output.open("wb") as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        child = subprocess.Popen(command, env=env, stdout=out, stderr=err)
        over = threading.Event()
        watcher = threading.Thread(target=watch, args=(child.pid, peaks, together, over))
        watcher.start()
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - began
        code = child.returncode = os.waitstatus_to_exitcode(status)
        over.set()
        watcher.join()
        err.seek(0)
        if code:
            raise SystemExit(f"{name}: {last_line(err.read().decode('utf-8', 'replace'))}")
    workers = [peak for pid, peak in peaks.items() if pid != child.pid]
    return Cost(
        name=name,
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        parent_bytes=peaks.get(child.pid, 0),
        worker_bytes=max(workers, default=0),
        output_bytes=output.stat().st_size,
        tree_bytes=max(together),
    )


def watch(root: int, peaks: dict[int, int], together: list[int], over: threading.Event) -> None:
    """The peak memory of each of these processes, as the kernel reports it, and of all at once."""
    while not over.wait(_POLL_S):
        pids = family(root)
        together[0] = max(together[0], sum(map(shared_bytes, pids)))
        for pid in pids:
            peak = peak_bytes(pid)
            if peak:
                peaks[pid] = max(peak, peaks.get(pid, 0))


def family(root: int) -> list[int]:
    pids = [root]
    for pid in pids:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        pids += map(int, children)
    return pids


def shared_bytes(pid: int) -> int:
    """Of a page that several processes share, each counts its part."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def explain_both(form: str, work: Path, chosen: argparse.Namespace) -> list[Cost]:
    folder = work / form
    began = time.perf_counter()
    text_bytes, file_bytes = write_job(folder, form, chosen.ranks, chosen.bytes)
    print(
        f"{form}: {chosen.ranks} ranks, each {file_bytes / 1e6:.2f} MB of file, "
        f"{text_bytes / 1e6:.1f} MB of JSON (written in {time.perf_counter() - began:.0f} s)"
    )
    env = environment(STEPSCOPE_CACHE_DIR=str(work / f"cache-{form}"))
    how = ["--engine", chosen.engine, *(["--workers", chosen.workers] if chosen.workers else [])]
    answer, report = work / f"{form}.json", work / f"{form}.html"
    costs = [
        measure("--json, no cache yet", [str(folder), "--json", *how], answer, env),
        measure("--html", [str(folder), "--html", str(report), *how], work / "said.txt", env),
    ]
    print_costs(costs, report)
    check_answer(json.loads(answer.read_bytes()), chosen.ranks)
    shutil.rmtree(folder)
    shutil.rmtree(work / f"cache-{form}", ignore_errors=True)
    return costs


def explain_run(work: Path, chosen: argparse.Namespace) -> list[Cost]:
    """Writing, closing and explaining are processes of their own: this one stays small."""
    folder, plain = work / "run", environment(STEPSCOPE_CACHE_DIR=str(work / "cache"))
    here, ranks = Path(__file__).parent, chosen.ranks or 10_000
    make = [sys.executable, str(here / "simulated_ranks.py"), str(chosen.source), str(folder)]
    said = subprocess.run(
        [*make, "--ranks", str(ranks)], env=plain, check=True, capture_output=True, text=True
    )
    plan = json.loads(said.stdout)
    files = sum(len(names) for _, _, names in os.walk(folder))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"run: {ranks} ranks, {files} files, {size / 1e6:.0f} MB")
    close = [*make[:2], "--close", str(folder)]
    print(f"  {subprocess.run(close, check=True, capture_output=True, text=True).stdout.strip()}")
    how = ["--engine", chosen.engine, *(["--workers", chosen.workers] if chosen.workers else [])]
    answer, report = work / "run.json", work / "run.html"
    costs = [
        measure("--json, no cache yet", [str(folder), "--json", *how], answer, plain),
        measure("--html", [str(folder), "--html", str(report), *how], work / "said.txt", plain),
    ]
    print_costs(costs, report)
    check_planted(json.loads(answer.read_bytes()), plan)
    return costs


def check_planted(answer: dict[str, Any], plan: dict[str, Any]) -> None:
    """The slow rank, and the slow host or all of its ranks, are named."""
    named = answer["stragglers"]["ranks"]
    ranks = {one["rank"] for one in named} | {
        rank for one in named for rank in one.get("ranks", ())
    }
    wanted = {plan["slow_rank"], *plan["slow_ranks"]}
    untraced = answer["ranks_without_trace"]["count"]
    print(f"  verdict  {answer['verdict']}\n  {len(answer['ranks'])} traced, {untraced} not")
    print(f"  named    {', '.join(map(str, sorted(ranks - {None})))}")
    if not wanted <= ranks or len(ranks - wanted - {None}) > len(wanted):
        raise SystemExit(f"expected ranks {sorted(wanted)}")


def check_answer(answer: dict[str, Any], ranks: int) -> None:
    numbers = [rank["rank"] for rank in answer["ranks"]]
    if numbers != list(range(ranks)):
        raise SystemExit(f"expected ranks 0 to {ranks - 1}, found {len(numbers)}")
    print(f"  verdict  {answer['verdict']}")


def print_costs(costs: list[Cost], report: Path) -> None:
    for cost in costs:
        size = report.stat().st_size if cost.name == "--html" else cost.output_bytes
        took = f"{cost.wall_s:5.0f} s (CPU {cost.cpu_s:4.0f} s)"
        memory = (
            f"parent {cost.parent_bytes / 1e6:4.0f} MB, a worker {cost.worker_bytes / 1e6:.0f} MB"
        )
        tree = f"all {cost.tree_bytes / 1e6:.0f} MB"
        print(f"  {cost.name:<20} {took}   {memory}, {tree}   writes {size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="default: 1024; 10000 for --form run")
    parser.add_argument("--bytes", type=int, default=MEGABYTE, help="of each rank's file")
    forms = [*SOURCES, "run"]
    parser.add_argument("--form", choices=forms, action="append", help="default: json and gz")
    parser.add_argument("--source", type=Path, default=GOLDEN / "cpu-two-ranks", help="a real run")
    parser.add_argument("--engine", default="pool")
    parser.add_argument("--workers")
    parser.add_argument("--work", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.work, prefix="many-ranks-") as work:
        if chosen.form == ["run"]:
            costs = explain_run(Path(work), chosen)
            finish([*results_of_run(costs)], check=chosen.check)
            return
        chosen.ranks = chosen.ranks or 1024
        costs = [
            cost
            for form in chosen.form or SOURCES
            for cost in explain_both(form, Path(work), chosen)
        ]
    results = [
        Result(target=MANY_WALL, value=max(cost.wall_s for cost in costs) / 60),
        Result(target=MANY_WORKER, value=max(cost.worker_bytes for cost in costs) / 1e9),
        Result(target=MANY_PARENT, value=max(cost.parent_bytes for cost in costs) / 1e9),
    ]
    finish(results, check=chosen.check)


def results_of_run(costs: list[Cost]) -> Iterator[Result]:
    yield Result(target=RANKS_WALL, value=max(cost.wall_s for cost in costs) / 60)
    yield Result(target=RANKS_TREE, value=max(cost.tree_bytes for cost in costs) / 1e9)


def finish(results: list[Result], *, check: bool) -> None:
    for result in results:
        print(result.row())
    if check and not all(result.met for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
