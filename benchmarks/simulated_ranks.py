"""Writes the run folder of a job with thousands of ranks, from a real capture of a few.

    python benchmarks/simulated_ranks.py SOURCE FOLDER [--ranks 10000] [--steps 300]

SOURCE is a run folder of two or more ranks. Every simulated rank takes the times of its own work
from a real one, step by step, with 1% of noise of its own, and waits in every all-reduce until the
last rank has come. Eight ranks share a host, whose clock is some milliseconds off. One rank and,
elsewhere, all ranks of one host take longer in their forward pass, and everybody waits for them.
The traces are the real ones; `--ranks auto` decides who has one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from stepscope.measure.ranks import spread_evenly
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.step_files import read_step_columns

PER_HOST = 8
ROUNDS, MEETINGS = 50, (1, 100, 200)
CALLS = 2  # all-reduces in a step
_TRANSFER_NS = 300_000
_LEAST_STEP_NS = 10e6  # steps of a shorter capture are stretched
_ROUND_TRIP_NS = 150_000
_BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_INFO = re.compile(rb'"rank": \d+, "world_size": \d+, "pg_count".*?\}\]\}')

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many ranks and steps, and who is slow by how much of a step."""

    ranks: int
    steps: int = 300
    slow_rank: int | None = None
    slow_host: int | None = None
    rank_share: float = 0.20
    host_share: float = 0.12
    seed: int = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The work of the real ranks in each step, without waiting; (ranks, steps) in nanoseconds."""

    folders: tuple[Path, ...]
    forward: Floats
    backward: Floats
    optimizer: Floats
    began_ns: int


def planted(ranks: int, steps: int = 300) -> Plan:
    """A slow rank in the first half of the job, a slow host in the second."""
    hosts = ranks // PER_HOST
    return Plan(ranks=ranks, steps=steps, slow_rank=ranks // 3, slow_host=hosts * 3 // 4)


def read_source(folder: Path, steps: int) -> Source:
    """A step of the simulation repeats a plain one of the capture. Of its backward pass only what
    the fastest rank needed is work: the others waited in it."""
    folders = tuple(sorted(folder.glob("rank-*")))
    columns = [read_step_columns(one, Oddities("steps")) for one in folders]
    plain = [np.flatnonzero(one.plain & (one.number > 20)) for one in columns if one is not None]
    rows = min(map(len, plain))

    def work(phase: str) -> Floats:
        known = [
            one.phases_ns[phase][place[:rows]].astype(float)
            for one, place in zip(columns, plain, strict=True)
            if one is not None
        ]
        # Cores were shared: a step that took three times as long as usual says nothing here.
        usual = [np.minimum(column, 1.3 * np.median(column)) for column in known]
        # Real ranks are not quite equal either: here only the planted ones are to stand out.
        medians = [max(float(np.median(column)), 1.0) for column in usual]
        level = float(np.mean(medians))
        even = [column * level / median for column, median in zip(usual, medians, strict=True)]
        return np.array(even)[:, np.arange(steps) % rows]

    forward, backward = work("forward"), work("backward")
    backward = np.broadcast_to(backward.min(axis=0), backward.shape) * 0.5
    longer = max(1.0, _LEAST_STEP_NS / float(np.median(forward + backward)))
    first = columns[0]
    assert first is not None
    return Source(
        folders=folders,
        forward=forward * longer,
        backward=backward * longer,
        optimizer=work("optimizer") * longer,
        began_ns=int(first.end_unix_ns[0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What happened, in true time since the first step; (ranks, steps)."""

    forward: Floats
    backward: Floats
    optimizer: Floats
    ended: Floats
    arrived: list[Floats]  # at each all-reduce


def play(source: Source, plan: Plan) -> Played:
    draw = np.random.default_rng(plan.seed)
    which = np.arange(plan.ranks) % len(source.folders)

    def noisy(column: Floats) -> Floats:
        return column[which] * (1 + 0.01 * draw.standard_normal((plan.ranks, plan.steps)))

    forward, compute, optimizer = map(noisy, (source.forward, source.backward, source.optimizer))
    step_ns = float(np.median(forward.max(axis=0) + compute.max(axis=0)))
    if plan.slow_rank is not None:
        forward[plan.slow_rank] += plan.rank_share * step_ns
    if plan.slow_host is not None:
        on_host = slice(plan.slow_host * PER_HOST, (plan.slow_host + 1) * PER_HOST)
        forward[on_host] += plan.host_share * step_ns
    began = np.zeros(plan.ranks)
    ended, backward = np.zeros_like(forward), np.zeros_like(forward)
    arrived = [np.zeros_like(forward) for _ in range(CALLS)]
    for step in range(plan.steps):
        at = began + forward[:, step]
        into = at
        for calls in arrived:  # buckets overlap: nobody waits before the last one
            at = at + compute[:, step] / CALLS
            calls[:, step] = at
        done = at.max() + _TRANSFER_NS
        backward[:, step] = done - into
        began = done + optimizer[:, step]
        ended[:, step] = began
    return Played(
        forward=forward, backward=backward, optimizer=optimizer, ended=ended, arrived=arrived
    )


# Files


def write_simulated(source_folder: Path, folder: Path, plan: Plan) -> None:
    source = read_source(source_folder, plan.steps)
    played = play(source, plan)
    draw = np.random.default_rng(plan.seed + 1)
    offsets = draw.integers(-5_000_000, 5_000_000, -(-plan.ranks // PER_HOST))
    traced = set(spread_evenly(plan.ranks))
    folder.mkdir(parents=True)
    for rank in range(plan.ranks):
        place = folder / f"rank-{rank:05d}"
        place.mkdir()
        clock = source.began_ns + int(offsets[rank // PER_HOST])
        _write_steps(place, rank, played, clock, source)
        _write_collectives(place, rank, played, clock)
        (place / "clock.json").write_text(json.dumps(_rounds(draw, rank, played, clock)))
        real = source.folders[rank % len(source.folders)]
        facts = json.loads((real / "rank.json").read_text())
        (place / "rank.json").write_text(json.dumps(_facts(facts, rank, plan, rank in traced)))
        if rank in traced:
            _write_trace(place, real, rank, plan, int(offsets[rank // PER_HOST]))
    _write_run_files(source_folder, folder, source.began_ns, played.ended.max(), offsets)


def host_name(rank: int) -> str:
    return f"node{rank // PER_HOST:04d}"


def _write_steps(place: Path, rank: int, played: Played, clock: int, source: Source) -> None:
    columns = [played.forward[rank], played.backward[rank], played.optimizer[rank]]
    forward, backward, optimizer = (np.rint(one).astype(np.int64).tolist() for one in columns)
    ended = (np.rint(played.ended[rank]).astype(np.int64) + clock).tolist()
    head = (source.folders[0] / "steps.jsonl").read_text().split("\n", 1)[0]
    first = json.loads(head) | {"end_unix_ns": clock}
    lines = [json.dumps(first)]
    for place_in_run, row in enumerate(zip(forward, backward, optimizer, ended, strict=True), 1):
        f, b, o, end = row
        lines.append(
            f'{{"step": {place_in_run}, "wall_ns": {f + b + o}, "data_ns": 0, "forward_ns": {f}, '
            f'"backward_ns": {b}, "optimizer_ns": {o}, "other_ns": 0, "end_unix_ns": {end}, '
            '"window": false}'
        )
    (place / "steps.jsonl").write_text("\n".join(lines) + "\n")


def _write_collectives(place: Path, rank: int, played: Played, clock: int) -> None:
    calls = np.stack([one[rank] for one in played.arrived], axis=1).ravel()
    created = np.rint(calls).astype(np.int64) + clock
    line = {
        "schema": 1,
        "recorder": "_dump_fr_trace_json",
        "steps": [0, len(created) // CALLS],
        "took_ns": 0,
        "first_record": 0,
        "created_ns": np.diff(created, prepend=0).tolist(),
        "sequence": [1] * len(created),
        "groups": ["0"],
        "group": [0] * len(created),
        "names": ["gloo:all_reduce"],
        "name": [0] * len(created),
    }
    packed = gzip.compress(f"{json.dumps(line)}\n".encode(), 6)
    (place / "collectives-00001.json.gz").write_bytes(packed)


def _rounds(draw: np.random.Generator, rank: int, played: Played, clock: int) -> dict[str, Any]:
    """Rank 0 leaves each round in an instant; the others come before it and leave after it."""
    syncs = []
    for step in MEETINGS:
        if step >= played.ended.shape[1]:
            continue
        instants = played.ended[0, step] + np.arange(ROUNDS) * 2.0 * _ROUND_TRIP_NS
        half = draw.uniform(0.5, 1.0, (2, ROUNDS)) * (0.0 if rank == 0 else _ROUND_TRIP_NS / 2)
        marks = np.stack((instants - half[0], instants + half[1]), axis=1)
        rounds = (np.rint(marks).astype(np.int64) + clock).tolist()
        syncs.append({"label": "run", "step": step, "rounds": rounds, "clock": "unix_ns"})
    return {"schema": 1, "rank": rank, "syncs": syncs, "notes": []}


def _facts(facts: dict[str, Any], rank: int, plan: Plan, traced: bool) -> dict[str, Any]:
    group = {"name": "0", "description": "default_pg", "backend": "cpu:gloo", "size": plan.ranks}
    members = {"rank": rank, "ranks": [], "ranges": [[0, plan.ranks - 1, 1]]}
    layout = {**facts["communication"], "groups": [group | members]}
    replicas = [{**one, "world_size": plan.ranks} for one in layout.get("ddp") or ()]
    if not traced:
        for one in replicas:
            one.pop("buckets", None)
            one.pop("grad_ready_order", None)
    process = {
        **(facts.get("process") or {}),
        "host": host_name(rank),
        "pid": 1000 + rank % PER_HOST,
    }
    return facts | {
        "rank": rank,
        "world_size": plan.ranks,
        "steps": plan.steps + 1,
        "trace": {"chosen": traced, "ranks": "auto"},
        "communication": {**layout, "ddp": replicas},
        "host": host_name(rank),
        "pid": process["pid"],
        "process": process,
    }


def _write_trace(place: Path, real: Path, rank: int, plan: Plan, offset_ns: int) -> None:
    text = gzip.decompress((real / "trace.json.gz").read_bytes())
    info = f'"rank": {rank}, "world_size": {plan.ranks}}}'.encode()
    text = _INFO.sub(info, text, count=1)
    base = _BASE.search(text)
    assert base is not None
    text = _BASE.sub(b'"baseTimeNanoseconds": %d' % (int(base[1]) + offset_ns), text, count=1)
    (place / "trace.json.gz").write_bytes(gzip.compress(text, 6))
    for name in ("memory.json", "samples.json"):
        if (real / name).exists():
            (place / name).write_bytes((real / name).read_bytes())


def _write_run_files(
    source: Path, folder: Path, began_ns: int, length_ns: float, offsets: Ints
) -> None:
    """run.json, and a file for the `stepscope run` of every host, by that host's clock."""
    run = json.loads((source / "run.json").read_text())
    start, end = began_ns / 1e9 - 20, (began_ns + float(length_ns)) / 1e9 + 2
    times = {"started_unix": start, "ended_unix": end, "status": "finished", "exit_code": 0}
    (folder / "run.json").write_text(json.dumps(run | times | {"ranks": []}))
    (folder / "hosts").mkdir()
    for place, offset in enumerate((offsets / 1e9).tolist()):
        part = {"job": "simulated", "place": place, "places": len(offsets), "attempt": 0}
        part |= {"host": host_name(place * PER_HOST), "status": "finished", "exit_code": 0}
        part |= {"started_unix": start + offset, "ended_unix": end + offset}
        (folder / "hosts" / f"{place:05d}.json").write_text(json.dumps(part))


def close(folder: Path) -> str:
    """What `stepscope run` does at the end, without running anything."""
    from stepscope.measure import folder as layout
    from stepscope.measure.settings import Settings
    from stepscope.ui.jobs.run_folder import describe_end, describe_ranks, shortened

    began, cpu = time.perf_counter(), time.process_time()
    layout.remove_leftovers(folder)
    ranks = describe_ranks(folder, Settings(folder=str(folder)), 0)
    record = json.loads((folder / "run.json").read_text()) | describe_end(0, ranks)
    text = json.dumps(next(iter(shortened(record, ranks))))
    (folder / "run.json").write_text(text)
    took = f"{time.perf_counter() - began:.1f} s (CPU {time.process_time() - cpu:.1f} s)"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"closed in {took}, {peak / 1e6:.0f} MB; run.json has {len(text) / 1e3:.1f} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--close", action="store_true", help="close FOLDER, as run does at the end")
    chosen = parser.parse_args()
    if chosen.close:
        print(close(chosen.folder))
        return
    plan = planted(chosen.ranks, chosen.steps)
    write_simulated(chosen.source, chosen.folder, plan)
    first = (plan.slow_host or 0) * PER_HOST
    print(json.dumps(asdict(plan) | {"slow_ranks": [*range(first, first + PER_HOST)]}))


if __name__ == "__main__":
    main()
