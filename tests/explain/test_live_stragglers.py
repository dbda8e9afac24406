"""Four real processes with a known fault: who is slow, and why.

Work is sleep, so the truth is known. A busy machine can make some rank slow for a while, and
stepscope then rightly says so or leaves the window unresolved. Of the WINDOWS windows of a run,
the resolved ones must give the expected verdict at a rate of at least RATE; one must be resolved.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope import explain_job
from stepscope.records.job import Job

SCRIPT = Path(__file__).parent / "scripts/stragglers.py"
START = Path(__file__).parent / "scripts/start_ranks.py"
LAUNCH = Path(__file__).parent / "scripts/two_hosts.sh"
WINDOW = ("--wait", "4", "--warmup", "1", "--active", "6", "--no-explain")
WINDOWS, RATE = 5, 0.6
STEPS = 4 + 1 + 6


def capture(
    out: Path, *arguments: str, windows: int = WINDOWS, launcher: tuple[str, ...] | None = None
) -> Path:
    how = launcher or (sys.executable, str(START), "4")
    window = (*WINDOW, "--repeat", str(windows))
    ours = (sys.executable, "-m", "stepscope", "run", "--out", str(out), *window, "--")
    arguments = ("--steps", str(windows * STEPS + 4), *arguments)
    done = subprocess.run(
        [*ours, *how, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return out


def explained(run: Path) -> Job:
    job = explain_job(run, cache=False).job
    assert job is not None
    return job


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without any fault, of several windows."""
    return capture(tmp_path_factory.mktemp("healthy") / "run")


def verdict(job: Job) -> tuple[str, str | None, int | None]:
    stragglers = job.stragglers
    if not stragglers.ranks:
        return stragglers.verdict, None, None
    return stragglers.verdict, stragglers.ranks[0].cause, stragglers.ranks[0].rank


def only_window(run: Path, number: int, out: Path) -> Path:
    """A copy of the run as if it had captured this window alone."""
    shutil.copytree(run, out)
    for folder in out.glob("rank-*"):
        traces = [folder / f"trace{'' if n == 0 else f'-{n}'}.json.gz" for n in range(WINDOWS)]
        chosen = traces[number].read_bytes()
        for trace in traces:
            trace.unlink()
        (folder / "trace.json.gz").write_bytes(chosen)
    return out


def expect_in_most_windows(
    run: Path, expected: tuple[str, str | None, int | None], tmp_path: Path
) -> None:
    verdicts = [
        verdict(explained(only_window(run, number, tmp_path / f"window-{number}")))
        for number in range(WINDOWS)
    ]
    resolved = [answer for answer in verdicts if answer[0] != "not resolved"]
    assert resolved, verdicts
    assert resolved.count(expected) >= RATE * len(resolved), verdicts


@pytest.mark.slow
def test_a_rank_that_computes_longer(tmp_path: Path) -> None:
    run = capture(tmp_path / "run", "--slow-compute", "2")
    expect_in_most_windows(run, ("found", "compute", 2), tmp_path)


@pytest.mark.slow
def test_a_rank_whose_data_comes_late(tmp_path: Path) -> None:
    run = capture(tmp_path / "run", "--slow-input", "1")
    expect_in_most_windows(run, ("found", "input", 1), tmp_path)


@pytest.mark.slow
def test_nothing_wrong_accuses_nobody(tmp_path: Path, healthy: Path) -> None:
    expect_in_most_windows(healthy, ("none", None, None), tmp_path)


@pytest.mark.slow
def test_an_offset_of_five_milliseconds_is_found(tmp_path: Path, healthy: Path) -> None:
    """All ranks run on this machine's one clock, so the whole offset is ours."""
    before, run = (only_window(healthy, 0, tmp_path / name) for name in ("before", "run"))
    shift(run / "rank-00003", 5_000_000)
    job = explained(run)
    assert explained(before).clock.aligned
    assert job.clock.aligned
    for rank, offset_ns in {1: 0, 2: 0, 3: 5_000_000}.items():
        assert abs(job.clock.offset_ns[rank] - offset_ns) < 100_000
        assert abs(job.clock.offset_ns[rank] - offset_ns) <= job.clock.error_ns[rank]


def shift(folder: Path, by_ns: int) -> None:
    """As if this rank's clock had been ahead all along."""
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    trace["baseTimeNanoseconds"] += by_ns
    (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    clock = json.loads((folder / "clock.json").read_text())
    for sync in clock["syncs"]:
        sync["rounds"] = [[came + by_ns, left + by_ns] for came, left in sync["rounds"]]
    (folder / "clock.json").write_text(json.dumps(clock))
    lines = [json.loads(line) for line in (folder / "comms.jsonl").read_text().splitlines()]
    shifted = [{**line, "created_ns": line["created_ns"] + by_ns} for line in lines]
    (folder / "comms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shifted))


# A slow link, between two network namespaces that stand for two hosts.


def _network(*commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-ec", "\n".join(commands)], capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs ip and tc (iproute2)")
    names = f"ssa{os.getpid()}", f"ssb{os.getpid()}"
    a, b = names
    added = _network(
        f"ip netns add {a}",
        f"ip netns add {b}",
        f"ip link add {a} netns {a} type veth peer name {b} netns {b}",
        f"ip -n {a} addr add 10.77.0.1/24 dev {a}",
        f"ip -n {b} addr add 10.77.0.2/24 dev {b}",
        *(f"ip -n {name} link set lo up; ip -n {name} link set {name} up" for name in names),
        f"tc -n {b} qdisc add dev {b} root tbf rate 10gbit burst 1mb latency 50ms",
        f"tc -n {b} qdisc del dev {b} root",
    )
    try:
        if added.returncode:
            pytest.skip(f"no network namespaces or token buckets here: {added.stderr.strip()}")
        yield names
    finally:
        _network(f"ip netns del {a} || true", f"ip netns del {b} || true")


@pytest.mark.slow
def test_a_slow_link_between_two_hosts(
    tmp_path: Path, two_hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_PROFILES", str(tmp_path / "profiles"))
    launcher = ("bash", str(LAUNCH), sys.executable, *two_hosts)
    quickly = ("--quick", "--kind", "all_reduce", "--seconds", "0.5")
    calibrated = subprocess.run(
        [*launcher, "-m", "stepscope", "calibrate", *quickly],
        capture_output=True,
        text=True,
    )
    assert calibrated.returncode == 0, calibrated.stderr
    far = two_hosts[1]
    bucket = "tbf rate 100mbit burst 256kb latency 1s"
    slowed = _network(f"tc -n {far} qdisc add dev {far} root {bucket}")
    assert slowed.returncode == 0, slowed.stderr
    job = explained(capture(tmp_path / "run", windows=1, launcher=launcher))
    assert verdict(job) == ("found", "link", None)
    assert job.stragglers.ranks[0].slowdown > 1.5
