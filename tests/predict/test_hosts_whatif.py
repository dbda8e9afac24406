"""hosts=N: what more hosts do to a step, by hand, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ddp_steps import MB, calibration, cpu_trace, ddp_trace, truth
from msgspec.structs import replace

from benches import ask, bench_for
from stepscope.changes import CHANGES
from stepscope.errors import UsageError
from stepscope.predict.collective_times import (
    Hop,
    hierarchical_over_hosts,
    hop_of_line,
    ring_over_hosts,
)
from stepscope.predict.planned_exchange import spans_hosts
from stepscope.predict.whatifs import parse_setting
from stepscope.predict.whatifs.ranks import parse_hosts
from stepscope.records.job import Clock, Job, RankTimes, Stragglers
from stepscope.step.work import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench
    from stepscope.records.hardware import Profile

SLOW = Hop(alpha_ns=1000.0, beta_ns_per_byte=1.0)
FAST = Hop(alpha_ns=100.0, beta_ns_per_byte=0.01)


def job_on(*hosts: str | None) -> Job:
    """A job whose rank i is on hosts[i], with three steps alike."""
    steps = np.full((3, len(hosts)), 2_000_000, np.int64)
    times = RankTimes(step_ms=2, own_ms=2, exposed_comm_ms=0, compute_ms=2, input_ms=0)
    return Job(
        ranks=tuple(range(len(hosts))), times=(times,) * len(hosts),
        hosts={rank: host for rank, host in enumerate(hosts) if host},
        steps=(0, 1, 2), step_ns=steps, own_ns=steps, input_ns=steps * 0,
        exposed_comm_ns=steps * 0, clock=Clock(aligned=False), collectives=(), arrivals=(),
        stragglers=Stragglers(verdict="none"), path=None, lanes=None,
    )  # fmt: skip


def comm_us(bench: Bench, *settings: str) -> float:
    """All collectives of the step under these settings."""
    trial = bench.begin()
    for setting in settings:
        trial = bench.change(trial, parse_setting(setting))
    tasks = trial.context.graph.tasks
    return float(tasks.dur_ns[tasks.kind == Kind.COMM].sum()) / 1e3


def ddp_on(folder: Path, *hosts: str | None, dur: float = 1000, **inputs: Any) -> Bench:
    """One all-reduce of 4 MiB that takes `dur` µs after 1000 µs of compute; 500 µs follow."""
    trace = ddp_trace(folder, elements=MB, dur=dur, ranks=len(hosts))
    return bench_for(trace, job=job_on(*hosts), measured=truth(1500 + dur), **inputs)


# By hand


def test_a_ring_is_as_slow_as_its_slowest_hop() -> None:
    """2 hosts x 2 ranks: 6 hops of 1000 ns, and 1.5 x bytes at 1 ns."""
    line = ring_over_hosts(2, 2, FAST, SLOW)
    assert line.at(0) == pytest.approx(6000)
    assert line.at(1000) == pytest.approx(6000 + 1500)


def test_a_slow_bus_inside_hosts_decides_too() -> None:
    line = ring_over_hosts(2, 2, Hop(alpha_ns=0.0, beta_ns_per_byte=5.0), SLOW)
    assert line.at(1000) == pytest.approx(6 * 1000 + 1.5 * 5 * 1000)


def test_one_rank_on_each_host_has_no_hop_inside() -> None:
    assert ring_over_hosts(4, 1, None, SLOW) == ring_over_hosts(4, 1, SLOW, SLOW)
    assert ring_over_hosts(4, 1, None, SLOW).at(1000) == pytest.approx(6000 + 1500)


def test_a_tree_climbs_inside_and_between_hosts() -> None:
    """4 hosts x 2 ranks: 2 (1 x 100 + 2 x 1000) ns."""
    assert ring_over_hosts(4, 2, FAST, SLOW, tree_latency=True).at(0) == pytest.approx(4200)


def test_a_hierarchical_all_reduce_sends_less_between_hosts() -> None:
    """2 x 4: inside 6 x 100 + 1.5 x 0.01 n, between 2 x 1000 + 1.0 x 1 n; a ring: 1.75 n."""
    line = hierarchical_over_hosts(2, 4, FAST, SLOW)
    assert line.at(0) == pytest.approx(600 + 2000)
    assert line.at(10_000) == pytest.approx(2600 + 150 + 10_000)
    assert ring_over_hosts(2, 4, FAST, SLOW).at(10_000) == pytest.approx(14_000 + 17_500)


def test_a_hop_comes_back_from_its_ring() -> None:
    line = ring_over_hosts(3, 2, FAST, SLOW)
    assert hop_of_line((line,), 6) == SLOW


# From a capture of several hosts


def test_twice_the_hosts_move_half_as_many_bytes_more(tmp_path: Path) -> None:
    """1 rank on each of 2 hosts: 2 (p-1)/p is 1, then 1.5; 1000 µs become 1500."""
    bench = ddp_on(tmp_path, "node0", "node1")
    found = ask(bench, "hosts=4")
    assert not found.refused
    assert comm_us(bench, "hosts=4") == pytest.approx(1.5 * comm_us(bench), rel=0.001)
    longer_us = 0.5 * comm_us(bench)
    assert found.predicted_ms - found.baseline_ms == pytest.approx(longer_us / 1e3, rel=0.001)
    assert found.throughput_factor == pytest.approx(2 * found.baseline_ms / found.predicted_ms)
    assert found.low_ms < found.predicted_ms < found.high_ms
    assert "2 -> 4 hosts, with 1 worker on each" in found.assumptions
    assert any("extrapolated to 4" in line for line in found.assumptions)


def test_four_ranks_on_two_hosts_become_eight_on_four(tmp_path: Path) -> None:
    """2 (p-1)/p: 1.5 with 4 ranks, 1.75 with 8."""
    bench = ddp_on(tmp_path, "a", "a", "b", "b")
    found = ask(bench, "hosts=4")
    assert comm_us(bench, "hosts=4") / comm_us(bench) == pytest.approx(1.75 / 1.5, rel=0.001)
    assert "2 -> 4 hosts, with 2 workers on each" in found.assumptions


def test_as_many_hosts_as_now_change_nothing(tmp_path: Path) -> None:
    found = ask(ddp_on(tmp_path, "a", "a", "b", "b"), "hosts=2")
    assert found.predicted_ms == pytest.approx(found.baseline_ms)


def test_a_stated_link_replaces_the_captured_one(tmp_path: Path) -> None:
    """4 MiB over 2 hosts at 1 GB/s: 1 x 4.194 ms instead of 1 ms, without latency."""
    bench = ddp_on(tmp_path, "a", "b")
    found = ask(bench, "hosts=2:1GB/s:0us")
    assert comm_us(bench, "hosts=2:1GB/s:0us") / comm_us(bench) == pytest.approx(4.194, rel=0.001)
    assert any("the stated 1.00 GB/s" in line for line in found.assumptions)


def test_workers_on_several_hosts_do_not_count_one_hosts_calibration(tmp_path: Path) -> None:
    fast = calibration(
        2, alpha_us=1, us_per_mb=1, kind="cuda", device="NVIDIA H200", backend="nccl"
    )
    found = ask(ddp_on(tmp_path, "a", "b", calibrations=(fast,)), "workers=4")
    assert any("the fastest in the trace" in line for line in found.assumptions)


# From one host


def test_the_link_between_hosts_is_not_made_up(tmp_path: Path) -> None:
    found = ask(ddp_on(tmp_path, "a", "a"), "hosts=8")
    (reason,) = found.refused
    assert "the capture has one host" in reason
    assert "hosts=8:10GB/s" in reason


def test_a_stated_link_joins_several_copies_of_one_host(tmp_path: Path) -> None:
    """2 ranks on one host become 4 on two: 1.5 x 4 MiB at 1 GB/s, with 100 µs for a message.

    A tree climbs 1 level between hosts (200 µs) and 1 inside, priced by the data sheet: 24 µs are
    2 (p-1) hops of 12 µs, 2 levels of it another 24.
    """
    found = ask(ddp_on(tmp_path, "a", "a", dur=100), "hosts=2:1GB/s:100us")
    assert not found.refused
    added = found.predicted_ms - found.baseline_ms
    assert added == pytest.approx(1.5 * 4.194 + 0.2 + 0.024 - 0.1, rel=0.01)


def test_one_process_becomes_one_worker_on_each_host(tmp_path: Path) -> None:
    bench = bench_for(cpu_trace(tmp_path, [512, 512]))
    assert "one host" in ask(bench, "hosts=4").refused[0]
    found = ask(bench, "hosts=4:100MB/s:50us")
    assert not found.refused
    assert "1 -> 4 hosts, with 1 worker on each" in found.assumptions
    # Three buckets of gradients, 3 MiB in all: 1.5 x 31.5 ms and 3 x 6 x 50 µs.
    exchanged = next(line for line in found.assumptions if line.startswith("DDP exchanges"))
    assert "48." in exchanged or "47." in exchanged


def test_a_calibration_over_several_hosts_tells_the_link(tmp_path: Path) -> None:
    """World of 4 over 2 hosts: 400 µs per MiB. 8 ranks: 1.75 / 1.5 of that."""
    several = replace(
        calibration(4, alpha_us=0, us_per_mb=400, kind="cuda", device="NVIDIA H200",
                    backend="nccl"),
        hosts=2,
    )  # fmt: skip
    bench = ddp_on(tmp_path, "a", "a", dur=100, calibrations=(several,))
    found = ask(bench, "hosts=4")
    assert not found.refused
    assert any("extrapolated from 4 ranks" in line for line in found.assumptions)
    expected = 4 * 0.4 * 1.75 / 1.5
    # Of the 100 µs of the traced sum, the data sheet's part was the transfer.
    assert found.predicted_ms - found.baseline_ms == pytest.approx(expected - 0.1, rel=0.05)


def test_one_host_alone_needs_its_own_links(tmp_path: Path) -> None:
    """hosts=1 of a job on two: the data sheet knows NVLink; a CPU has none."""
    found = ask(ddp_on(tmp_path, "a", "a", "b", "b"), "hosts=1")
    assert not found.refused
    assert found.predicted_ms < found.baseline_ms
    assert any("data sheet" in line for line in found.assumptions)


# Refused and wrong


def test_hosts_that_are_not_known_are_refused(tmp_path: Path) -> None:
    assert "on which hosts" in ask(ddp_on(tmp_path, None, None), "hosts=4").refused[0]
    found = ask(ddp_on(tmp_path, "a", None), "hosts=4")
    assert "those of 1 are" in found.refused[0]


def test_uneven_hosts_are_refused(tmp_path: Path) -> None:
    found = ask(ddp_on(tmp_path, "a", "a", "b"), "hosts=4")
    assert "different numbers of ranks" in found.refused[0]
    assert "a 2, b 1" in found.refused[0]


def test_hosts_and_workers_are_one_question(tmp_path: Path) -> None:
    found = ask(ddp_on(tmp_path, "a", "b"), "hosts=4", "workers=16")
    assert any("leave out workers=N" in reason for reason in found.refused)


@pytest.mark.parametrize(
    "value", ["0", "x", "-2", "1.5", "", "8:", "8:fast", "8:0GB/s", "8:1GB/s:soon", "8:1GB/s:5"]
)
def test_a_value_that_makes_no_sense_is_wrong_use(tmp_path: Path, value: str) -> None:
    if value == "8:":  # as if nothing was stated
        assert parse_hosts(value) == (8, None)
        return
    with pytest.raises(UsageError, match="hosts="):
        ask(ddp_on(tmp_path, "a", "b"), f"hosts={value}")


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [("10GB/s", 1e10), ("10GB", 1e10), ("100Gbit/s", 1.25e10), ("100Gbps", 1.25e10),
     ("100Gb/s", 1.25e10), ("800Mbit/s", 1e8), ("2.5kB/s", 2500.0)],
)  # fmt: skip
def test_rates_count_bytes_or_bits(text: str, bytes_s: float) -> None:
    link = parse_hosts(f"2:{text}:20us")[1]
    assert link is not None
    assert link.bytes_s == pytest.approx(bytes_s)
    assert link.latency_ns == 20_000


def test_it_is_called_what_people_call_it() -> None:
    assert CHANGES["hosts"].describe("8") == "8 hosts"
    assert CHANGES["hosts"].describe("8:10GB/s") == "8 hosts (links of 10.0 GB/s)"


def test_older_calibrations_show_their_hosts_by_their_groups() -> None:
    def grouped(name: str) -> Profile:
        profile = calibration(2)
        return replace(profile, fits=tuple(replace(fit, group=name) for fit in profile.fits))

    assert spans_hosts(grouped("inter-host"))
    assert not spans_hosts(grouped("world"))
    assert spans_hosts(replace(grouped("world"), hosts=2))
