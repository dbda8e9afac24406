"""HTA's and TraceLens's printed figures, met to the last digit from our columns.

The figures are what HTA 0.5.0 and TraceLens (August 2026) print for the same files; peers.py
restates their definitions. So a difference between their figures and ours is never a matter of
reading: it is one of these, and the tests below state each as an identity.

HTA's timeline
  * rounds: a start up to the next whole µs, an end down. Every kernel loses up to 2 µs, one
    shorter than 1 µs becomes negative; then its own assertions stop it (7 of our 17 H200 files).
  * drops the last step where there are two or more: every device event whose launch call began at
    or after the last ProfilerStep, and every event without a launch. "Last" is the later of the
    host's mark and the device's copy of it (gpu_user_annotation), so where the device lags far
    behind (gpt2s_b8_fp32) nothing is dropped at all.
  * counts cuda_sync rows on a stream as busy time, and `Stream Wait Event` even as compute.
  * knows communication only as `nccl..Kernel`, and has one "non-compute" for it and for copies.

  * has no figure for mi300x_resnet_checkpoint_rank0of8 (TypeError) and cpu_only_gloo_rank34
    (IndexError).

HTA's idle split goes stream by stream, by the row before on that stream: gaps of one stream count
as idle while another one works, and overlapping rows give negative gaps. Ours is the one line of
the whole device, so no HTA figure can be compared with it, only reproduced.

TraceLens
  * drops device events to which no arrow is drawn from a launch: launched before the window, and
    all memsets on ROCm.
    It finds "No GPU events" in older files, whose arrows have another name or are missing
    (a100_legacy_control, both pair files), and in cpu_only_gloo_rank34.
  * counts memsets as computation.
  * adds doubles of µs since the file's base: noise of up to some ten ns in sums.
"""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope import read_trace
from stepscope.records.explanation import Timeline
from stepscope.records.trace import DeviceKind, Trace
from stepscope.step.timeline import divide
from stepscope.step.work import Kind, find_work

from .peers import (
    HtaRow,
    Span,
    hta_breakdown,
    hta_idle,
    hta_kind,
    hta_overlap_percent,
    hta_rows,
    length,
    merge,
    subtract,
    tracelens_keeps,
    tracelens_ms,
    tracelens_sets,
)

TRACES = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = pytest.mark.usefixtures("shared")

# idle, compute, non-compute, span in whole µs; overlap in percent
HTA = {
    "a100_alexnet": (12929684, 10637, 55690, 12996011, None),
    "a100_event_sync": (207, 49, 7, 263, None),
    "a100_event_sync_multi_stream": (19132, 371, 3, 19506, None),
    "a100_legacy_control": (62119, 234760, 86525, 383404, 47.03),
    "a100_nccl_rank0of2": (338781, 75169, 21636, 435586, 14.31),
    "h100_bert_small": (3653, 252, 2, 3907, None),
    "mi300x_bert_small": (3168, 326, 1, 3495, None),
    "pair_rank0of128": (321378, 106252, 172428, 600058, 11.81),
    "pair_rank1of128": (328671, 135548, 136455, 600674, 20.05),
    "gpt2s_b16_fp32": (5067, 905619, 54, 910740, None),
    "gpt2s_b4_fp32": (4984, 257117, 51, 262152, None),
    "gpt2s_b8_bf16_ddp1": (80231, 64186, 649, 145066, None),
    "gpt2s_b8_fp32": (5140, 481329, 70, 486539, None),
    "gpt2s_b8_tf32": (5629, 170273, 34, 175936, None),
    "mlp_b32_fp32_fused": (17566, 1702, 0, 19268, None),
    "mlp_b32_fp32_graph": (1976, 2909, 1, 4886, None),
    "mlp_b32_fp32_loop": (53419, 1582, 0, 55001, None),
    "vitb16_b64_bf16": (88470, 61452, 710, 150632, None),
    "vitb16_b64_fp32": (7275, 526884, 2232, 536391, None),
}
HTA_STOPS = (
    "gpt2s_b1_bf16_loop_sync",
    "gpt2s_b8_bf16",
    "gpt2s_b8_bf16_ckpt",
    "gpt2s_b8_bf16_compile",
    "gpt2s_b8_bf16_fused",
    "gpt2s_b8_bf16_graph",
    "gpt2s_b8_bf16_stack",
)
# host_wait, kernel_wait, other in whole µs, by stream
HTA_IDLE = {
    "a100_alexnet": {7: (12855007, 104, 0), 20: (12011718, 3, 0)},
    "a100_event_sync": {7: (212, 0, 0)},
    "a100_event_sync_multi_stream": {20: (32, 0, 0), 24: (0, 15, 0), 28: (0, 15, 0)},
    "a100_legacy_control": {
        7: (102154, 14226, 32183),
        20: (346996, 621, 7470),
        21: (237710, 71, 0),
        22: (271786, 1253, 0),
    },
    "a100_nccl_rank0of2": {7: (357247, 2155, 0), 40: (381499, 0, 0)},
    "h100_bert_small": {7: (3653, 0, 0)},
    "mi300x_bert_small": {0: (3048, 120, 0)},
    "pair_rank0of128": {
        7: (213825, 1985, 261740),
        23: (596037, 70, 34),
        25: (0, 9, 47865),
        84: (148934, 6, 0),
        203: (0, 0, 0),
    },
    "pair_rank1of128": {
        7: (156827, 1816, 281064),
        23: (596313, 100, 0),
        25: (0, 9, 53028),
        84: (251860, 0, 23247),
        203: (0, 0, 0),
    },
    "gpt2s_b8_bf16_ddp1": {7: (75711, 4464, 56)},
    "gpt2s_b8_fp32": {7: (0, 5140, 0)},
    "mlp_b32_fp32_graph": {7: (0, 1976, 0)},
    "vitb16_b64_bf16": {7: (85014, 3401, 55)},
}
# computation, exposed comm, exposed memcpy, idle, total in ms
TRACELENS = {
    "a100_nccl_rank0of2": ("116.046561", "39.529327", "1.924190", "503.050928", "660.551006"),
    "h100_bert_small": ("0.307198", "0.000000", "0.002240", "3.598387", "3.907825"),
    "mi300x_bert_small": ("0.388345", "0.000000", "0.002404", "3.105228", "3.495976"),
    "a100_alexnet": ("10.638000", "0.000000", "55.503000", "12854.103000", "12920.244000"),
    "mi300x_resnet_checkpoint_rank0of8": (
        "19.234132",
        "35.283106",
        "1.583632",
        "0.416733",
        "56.517603",
    ),
    "gpt2s_b8_fp32": ("483.412617", "0.000000", "0.000000", "3.126603", "486.539219"),
    "mlp_b32_fp32_graph": ("4.267422", "0.000000", "0.003071", "0.616660", "4.887153"),
}
# Its Kineto wrote a missing stream as 2**32 - 1.
UNSIGNED_STREAMS = {"a100_alexnet"}


@cache
def trace_named(name: str) -> Trace:
    (path,) = TRACES.glob(f"*/{name}.json.gz")
    return read_trace(path, cache=False)


@cache
def hta_rows_of(name: str) -> list[HtaRow]:
    return hta_rows(trace_named(name), unsigned_streams=name in UNSIGNED_STREAMS)


def ours(name: str) -> Timeline:
    return divide(find_work(trace_named(name)))


def base_of(name: str) -> int:
    (path,) = TRACES.glob(f"*/{name}.json.gz")
    with gzip.open(path, "rt") as file:
        found = re.search(r'"baseTimeNanoseconds": (\d+)', file.read())
    return int(found[1]) if found else 0


def device_spans(trace: Trace, chosen: NDArray[np.bool_]) -> list[Span]:
    start = trace.device.start_ns[chosen]
    end = start + trace.device.dur_ns[chosen]
    return merge(zip(start.tolist(), end.tolist(), strict=True))


def our_kind(trace: Trace, kind: Kind) -> NDArray[np.bool_]:
    work = find_work(trace)
    chosen = np.zeros(len(trace.device), np.bool_)
    chosen[work.rows] = work.kind == kind
    return chosen


@pytest.mark.parametrize("name", HTA)
def test_hta_timeline_and_overlap_come_out_of_our_columns(name: str) -> None:
    idle, compute, non_compute, span, overlap = HTA[name]
    rows = hta_rows_of(name)
    assert hta_breakdown(rows) == {
        "idle": idle,
        "compute": compute,
        "non_compute": non_compute,
        "span": span,
    }
    assert hta_overlap_percent(rows) == overlap


@pytest.mark.parametrize("name", HTA_STOPS)
def test_hta_stops_where_rounding_makes_short_kernels_negative(name: str) -> None:
    rows = hta_rows_of(name)
    assert any(row.end < row.start for row in rows)
    with pytest.raises(AssertionError):
        hta_breakdown(rows)
    timeline = ours(name)  # and ours adds up
    assert timeline.idle_ns + timeline.compute_ns + timeline.exposed_memory_ns == timeline.span_ns


@pytest.mark.parametrize("name", HTA_IDLE)
def test_hta_idle_split_comes_out_of_our_columns(name: str) -> None:
    split = {stream: tuple(parts.values()) for stream, parts in hta_idle(hta_rows_of(name)).items()}
    assert split == HTA_IDLE[name]


@pytest.mark.parametrize("name", ["h100_bert_small", "mi300x_bert_small"])
def test_hta_loses_of_our_compute_exactly_what_it_rounds_away(name: str) -> None:
    """One step, one stream, kernels side by side: each loses the fractions of its two edges."""
    trace = trace_named(name)
    chosen = our_kind(trace, Kind.COMPUTE)
    start = trace.device.start_ns[chosen]
    end = start + trace.device.dur_ns[chosen]
    assert ours(name).compute_ns == int((end - start).sum())  # side by side
    rounded_away = int((-start % 1000 + end % 1000).sum())
    assert ours(name).compute_ns - 1000 * HTA[name][1] == rounded_away


def test_hta_lacks_of_our_compute_the_last_step_and_what_it_rounds_away() -> None:
    name = "a100_nccl_rank0of2"
    trace, rows = trace_named(name), hta_rows_of(name)
    compute = device_spans(trace, our_kind(trace, Kind.COMPUTE))
    kept = merge(
        (row.start * 1000, row.end * 1000) for row in rows if hta_kind(row.name) == "compute"
    )
    assert subtract(kept, compute) == []  # it calls nothing compute that we do not
    missing = subtract(compute, kept)
    last_kept = max(row.end for row in rows) * 1000 + 999
    edges = [span for span in missing if span[0] <= last_kept]
    last_step = [span for span in missing if span[0] > last_kept]
    assert max(end - start for start, end in edges) < 2000
    assert ours(name).compute_ns - 1000 * HTA[name][1] == length(edges) + length(last_step)
    assert length(last_step) > 30_000_000


def test_hta_adds_to_our_busy_time_exactly_the_sync_rows_outside_work() -> None:
    """a100_alexnet has whole µs and no steps: nothing is rounded, nothing dropped."""
    name = "a100_alexnet"
    trace, timeline = trace_named(name), ours(name)
    work = device_spans(trace, trace.device.kind <= DeviceKind.MEMSET)
    syncs = device_spans(trace, trace.device.kind == DeviceKind.SYNC)
    idle, compute, _, span, _ = HTA[name]
    outside = length(subtract(syncs, work))
    assert 1000 * (span - idle) - (timeline.span_ns - timeline.idle_ns) == outside
    waits = np.array([trace.strings[n] == "Stream Wait Event" for n in trace.device.name.tolist()])
    our_compute = device_spans(trace, our_kind(trace, Kind.COMPUTE))
    called_compute = length(subtract(device_spans(trace, waits), our_compute))
    assert 1000 * compute - timeline.compute_ns == called_compute


@pytest.mark.parametrize("name", TRACELENS)
def test_tracelens_figures_come_out_of_our_columns(name: str) -> None:
    sets = tracelens_sets(trace_named(name), base_ns=base_of(name))
    assert tuple(tracelens_ms(sets).values()) == TRACELENS[name]


@pytest.mark.parametrize("name", TRACELENS)
def test_tracelens_printed_figures_differ_from_exact_ones_by_noise_only(name: str) -> None:
    sets = tracelens_sets(trace_named(name))
    noise = 1 + len(sets.compute)  # ns: half of one an edge, and half of the last digit
    assert abs(float(TRACELENS[name][0]) * 1e6 - length(sets.compute)) <= noise


@pytest.mark.parametrize("name", TRACELENS)
def test_our_compute_less_tracelens_is_unlinked_compute_less_memsets(name: str) -> None:
    trace, theirs = trace_named(name), tracelens_sets(trace_named(name))
    mine, kept = our_kind(trace, Kind.COMPUTE), tracelens_keeps(trace)
    unlinked = subtract(device_spans(trace, mine & ~kept), theirs.compute)
    memset = device_spans(trace, kept & (trace.device.kind == DeviceKind.MEMSET))
    memsets_alone = subtract(memset, device_spans(trace, mine))
    expected = length(unlinked) - length(memsets_alone)
    assert ours(name).compute_ns - length(theirs.compute) == expected


@pytest.mark.parametrize("name", TRACELENS)
def test_our_busy_time_less_tracelens_is_exactly_what_it_drops(name: str) -> None:
    trace, theirs, timeline = trace_named(name), tracelens_sets(trace_named(name)), ours(name)
    dropped = (trace.device.kind <= DeviceKind.MEMSET) & ~tracelens_keeps(trace)
    extra = length(subtract(device_spans(trace, dropped), theirs.busy))
    assert timeline.span_ns - timeline.idle_ns - length(theirs.busy) == extra


def test_real_files_hold_device_time_that_tracelens_drops() -> None:
    """The identities above are not empty: a third of this file's kernel time has no launch."""
    trace = trace_named("mi300x_resnet_checkpoint_rank0of8")
    dropped = (trace.device.kind <= DeviceKind.MEMSET) & ~tracelens_keeps(trace)
    assert dropped.sum() == 968 + 81
    theirs = tracelens_sets(trace)
    assert ours("mi300x_resnet_checkpoint_rank0of8").compute_ns > length(theirs.compute)
