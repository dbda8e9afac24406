"""Findings about communication that one rank shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.explain.rank import explain_rank
from stepscope.explain.verdict import judge
from stepscope.records.explanation import Finding, RankExplanation
from stepscope.records.job import RankFolder
from stepscope.records.strategies import RankDataParallel
from stepscope.records.trace import Trace

from .build import AUTOGRAD, WORKER, Events, frame, kernel, memcpy, note, step
from .conftest import Read
from .strategies.found import ENGINE, comm, compute

# What is offered against exposed communication follows the strategy and the sizes.

FUNCTIONAL = ("_c10d_functional::all_reduce", "c10d::allreduce_")
LARGE, SMALL = 1_000_000, 21  # elements of 4 bytes


def replicas(elements: int) -> list[Events]:
    """DDP: one all-reduce that backward calls and nothing hides."""
    around = (ENGINE, "c10d::allreduce_")
    return [
        compute(0, 100, launched_at=-90),
        compute(100, 200, launched_at=-60, backward=True),
        comm("allreduce", 200, 300, launched_at=-50, thread=AUTOGRAD, around=around,
             elements=elements),
    ]  # fmt: skip


def shards(elements: int) -> list[Events]:
    around = ("FSDP::all_gather (a)", "c10d::_allgather_base_")
    return [
        comm("_allgather_base", 0, 100, launched_at=-50, around=around, elements=elements),
        compute(100, 200, launched_at=-40),
    ]


def split(elements: int) -> list[Events]:
    return [
        compute(0, 100, launched_at=-90),
        comm("allreduce", 100, 200, launched_at=-50, around=FUNCTIONAL, elements=elements,
             description="mesh_tp"),
    ]  # fmt: skip


def loss() -> list[Events]:
    return [
        compute(0, 100, launched_at=-90),
        comm("allreduce", 100, 200, launched_at=-50, around=("c10d::allreduce_",), elements=1),
    ]


def offered(read: Read, events: list[Events]) -> list[str]:
    rank = explain_rank(read(*events))
    (found,) = (each for each in rank.findings if each.id == "exposed-communication")
    return [remedy.id for remedy in found.remedies]


@pytest.mark.parametrize(
    ("events", "remedies"),
    [
        (replicas(LARGE), ["bucket-mb", "accumulate", "bandwidth"]),
        (replicas(SMALL), ["accumulate", "batch"]),
        (shards(LARGE), ["fsdp-prefetch", "keep-gathered", "reduce-dtype"]),
        (shards(SMALL), ["fsdp-prefetch", "larger-blocks", "batch"]),
        (split(LARGE), ["fewer-splits", "sequence-parallel"]),
        (split(SMALL), ["fewer-splits", "batch"]),
        (loss(), ["less-often"]),
    ],
    ids=["DDP", "84 bytes", "FSDP", "small shards", "split layers", "small layers", "a loss"],
)
def test_remedies_follow_the_strategy_and_the_sizes(
    read: Read, events: list[Events], remedies: list[str]
) -> None:
    assert offered(read, events) == remedies


# A step of several backward passes that exchanges gradients in each of them.

STEP = 300  # µs: two passes of 130 on the device, and 40 for the update


def one_pass(
    at: float, on_device: float, *, exchanges: bool = True, elements: int = 1_000_000
) -> list[Events]:
    """Forward and backward of 50 each, then an all-reduce of 30 that nothing hides."""
    done = on_device + 100
    out = [
        note("DistributedDataParallel.forward", start=at, dur=10),
        compute(on_device, on_device + 50, launched_at=at + 3),
        compute(on_device + 50, done, launched_at=at + 15, backward=True),
    ]
    if exchanges:
        around = (ENGINE, "c10d::allreduce_")
        out.append(
            comm("allreduce", done, done + 30, launched_at=at + 20, thread=AUTOGRAD,
                 around=around, elements=elements)
        )  # fmt: skip
    return out


def update(at: float, on_device: float) -> list[Events]:
    return [
        note("Optimizer.step#SGD.step", start=at, dur=8),
        compute(on_device, on_device + 40, launched_at=at + 3),
    ]


def steps(*kinds: str) -> list[Events]:
    """Three steps, each of these parts: `pass`, `silent` (no exchange), `other` (another size),
    `update`."""
    out: list[Events] = []
    for number in range(3):
        at, on_device = number * STEP, number * STEP + 10.0
        out.append(step(number, start=at, dur=STEP))
        for place, kind in enumerate(kinds):
            host = at + 1 + 30 * place
            if kind == "update":
                out += update(host, on_device)
                on_device += 40
                continue
            elements = 500_000 if kind == "other" else 1_000_000
            out += one_pass(host, on_device, exchanges=kind != "silent", elements=elements)
            on_device += 100 if kind == "silent" else 130
    return out


def found(read: Read, events: list[Events]) -> Finding | None:
    findings = explain_rank(read(*events)).findings
    return next((one for one in findings if one.id == "exchange-every-pass"), None)


def test_all_but_the_last_exchange_of_a_step_is_lost(read: Read) -> None:
    """60 of 300 µs are exposed, 30 of them in the first pass."""
    finding = found(read, steps("pass", "pass", "update"))
    assert finding is not None
    assert finding.title == "Gradients exchanged every pass"
    assert finding.summary == (
        "10% of the step goes into exchanging gradients in the first of 2 backward passes. "
        "One exchange after the last pass is enough."
    )
    assert finding.share == pytest.approx(30 / STEP)
    assert finding.severity == "medium"
    assert finding.evidence == (
        "exposed time before the last pass: 0.0300 ms of the 0.300 ms step",
        "2 all-reduces in a step of 2 passes, where 1 would be enough",
        "8.00 MB are exchanged in a step instead of 4.00 MB",
    )
    (remedy,) = finding.remedies
    assert remedy.id == "sync-once"
    assert "the first pass of a step" in remedy.summary


def test_the_line_that_calls_the_model_is_named_where_stacks_were_recorded(read: Read) -> None:
    events = steps("pass", "pass", "update")
    loop = frame("train.py(12): main", start=0, dur=3 * STEP)
    finding = found(read, [*events, loop])
    assert finding is not None
    assert [(place.file, place.line) for place in finding.where] == [("train.py", 12)]


@pytest.mark.parametrize(
    "parts",
    [
        ("pass", "update"),
        ("silent", "pass", "update"),
        ("pass", "update", "pass", "update"),  # two models, or two steps of one
        ("pass", "other", "update"),  # two models in one update
    ],
    ids=["one pass", "no_sync", "updates in between", "other buckets"],
)
def test_a_step_that_exchanges_each_gradient_once_is_fine(
    read: Read, parts: tuple[str, ...]
) -> None:
    assert found(read, steps(*parts)) is None


def test_an_exchange_that_compute_hides_costs_nothing(read: Read) -> None:
    """The same step, with compute from its beginning to its end on another stream."""
    events = steps("pass", "pass", "update")
    hidden = [compute(10 + n * STEP, (n + 1) * STEP, launched_at=n * STEP + 0.5) for n in range(3)]
    assert found(read, [*events, *hidden]) is None


SCRIPT = """\
import contextlib, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(4 * 9):
    is_last = (i + 1) % 4 == 0
    own = sys.argv[1] == "no_sync" and not is_last
    with model.no_sync() if own else contextlib.nullcontext():
        model(torch.randn(8, 64)).sum().backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("how", "passes"), [("every pass", 4), ("no_sync", 1)])
def test_passes_of_real_processes_are_counted(tmp_path: Path, how: str, passes: int) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    window = ("--wait", "3", "--warmup", "1", "--active", "3", "--no-memory")
    ours = [sys.executable, "-m", "stepscope", "run", "--out", str(out), "--no-explain", *window]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*ours, "--", *launch, str(script), how],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "run.json").read_text())["world_size"] == 2
    from stepscope.trace.read import read_trace
    from stepscope.trace.run_folder.rank_folder import read_rank_folder

    from .strategies.found import strategies_of

    path = next(out.glob("rank-00000/trace.json.gz"))
    parts = strategies_of(read_trace(path, cache=False), folder=read_rank_folder(path))
    (part,) = (one for one in parts if isinstance(one, RankDataParallel))
    assert part.passes == passes
    assert len(part.buckets) % passes == 0
    assert (part.early_exposed_ns > 0) is (passes > 1)


# gloo with a device's tensors: found by its copies or by the capture; the CPU's are no finding.

GLOO, BOTH = "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"


def training(*, copies: bool) -> list[Events]:
    """Compute 0 to 300, then gloo 300 to 900 on its own thread, then compute 900 to 1000."""
    out = [
        kernel("gemm", start=0, dur=300, launched_at=-50),
        note("gloo:all_reduce", start=300, dur=600, thread=WORKER),
        kernel("gemm", start=900, dur=100, launched_at=890),
    ]
    if copies:
        out.append(memcpy(start=880, dur=20, launched_at=870, thread=WORKER))
    return out


def layout(backend: str, **more: Any) -> RankFolder:
    groups = [{"name": "0", "backend": backend, "size": 2}]
    return RankFolder(layout={"groups": groups, **more})


def gloo_finding(trace: Trace, folder: RankFolder | None = None) -> Finding | None:
    rank: RankExplanation = explain_rank(trace, folder=folder)
    return next((each for each in rank.findings if each.id == "gloo-on-device"), None)


def test_idle_while_gloo_copies_to_the_device_is_its_share(read: Read) -> None:
    """Of 1000 the device idles 300 to 880 while gloo works: 58%."""
    finding = gloo_finding(read(*training(copies=True)))
    assert finding is not None
    assert finding.share == pytest.approx(0.58)
    assert finding.severity == "high"
    assert finding.title == "gloo instead of NCCL"
    assert 'init_process_group("nccl")' in finding.remedies[0].summary


def test_the_capture_tells_where_copies_are_not_linked(read: Read) -> None:
    finding = gloo_finding(read(*training(copies=False)), layout(GLOO, ddp=[{"module": "Net"}]))
    assert finding is not None
    assert "group 0: backend cpu:gloo,cuda:gloo" in finding.evidence


@pytest.mark.parametrize(
    "folder",
    [None, layout(BOTH, ddp=[{"module": "Net"}]), layout(GLOO)],
    ids=["bare trace", "NCCL for the device", "no model is spread"],
)
def test_gloo_for_tensors_of_the_cpu_is_as_it_should_be(
    read: Read, folder: RankFolder | None
) -> None:
    assert gloo_finding(read(*training(copies=False)), folder) is None


def test_a_cpu_has_nothing_better(read: Read) -> None:
    assert gloo_finding(read(note("gloo:all_reduce", start=0, dur=100))) is None


def test_it_leads_before_the_symptoms_it_causes(read: Read) -> None:
    rank = explain_rank(read(*training(copies=True)))
    assert "host-bound" in {each.id for each in rank.findings}
    assert judge((rank,), ()).findings[0].id == "gloo-on-device"
