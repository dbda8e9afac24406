"""Gradients into buckets as DDP fills them, and buckets one after the other beside backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from ddp_steps import LAYERS, MB, calibration, cpu_trace, gpu_trace
from hypothesis import given
from hypothesis import strategies as st

from benches import bench_for
from stepscope.predict.collective_times import find_transfer_times
from stepscope.predict.data_parallel import (
    Buckets,
    Gradients,
    NormBuffers,
    chain_buckets,
    fill_buckets,
    find_gradients,
)
from stepscope.predict.engine import Bench
from stepscope.predict.planned_exchange import ReduceRules, shard, sum_gradients
from stepscope.records.rank import MeasuredSteps
from stepscope.step.edit import InsertedCall, insert_collectives
from stepscope.step.graph import CallKind
from stepscope.step.replay import replay, step_ns

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.collective_times import TransferTimes
    from stepscope.records.trace import Trace

US = 1000.0


def gradients(*sizes: int, dtype: tuple[int, ...] = ()) -> Gradients:
    count = len(sizes)
    return Gradients(
        ready=np.arange(1, count + 1, dtype=np.int32),
        size_bytes=np.array(sizes, np.int64),
        dtype=np.array(dtype or (0,) * count, np.int32),
    )


def bench(trace: Trace, step_us: float = 4500) -> Bench:
    ns = round(step_us * US)
    truth = MeasuredSteps(
        steps=1, steps_ns=(ns,), step_ns=ns, wall_ns=ns, device_ns=None, phases_ns={}
    )
    return bench_for(trace, measured=truth)


def transfers(trace: Trace, *, ranks: int = 2, **how: float) -> TransferTimes:
    given = {"lost": 0.0, **how}
    found = find_transfer_times(
        ranks,
        trace=trace,
        profiles=[calibration(ranks, kind=trace.kind, device=trace.device_name or "cpu", **given)],
        traced=None,
        device=None,
        on_host=trace.kind == "cpu",
    )
    assert found is not None
    return found


# Filling


def test_a_bucket_closes_once_it_holds_its_limit() -> None:
    found = fill_buckets(gradients(6 * MB, 6 * MB, 20 * MB, 6 * MB, 3 * MB))
    # The first limit is 1 MiB, the others 25: one that holds 24 takes the next one too.
    assert (found.size_bytes / MB).tolist() == [6, 26, 9]
    assert found.ready.tolist() == [1, 3, 5]
    assert found.tensors.tolist() == [1, 2, 2]


def test_a_limit_that_was_asked_for_holds_for_the_first_bucket_too() -> None:
    found = fill_buckets(gradients(6 * MB, 6 * MB, 6 * MB), 10 * MB, 10 * MB)
    assert (found.size_bytes / MB).tolist() == [12, 6]


def test_types_do_not_share_a_bucket_and_what_is_left_comes_last() -> None:
    found = fill_buckets(gradients(2 * MB, MB // 4, 2 * MB, MB // 4, dtype=(0, 1, 0, 1)), MB)
    assert (found.size_bytes / MB).tolist() == [2, 2, 0.5]
    assert found.ready.tolist() == [1, 3, 4]


@given(
    st.lists(st.tuples(st.integers(1, 3_000_000), st.booleans()), min_size=1, max_size=30),
    st.integers(10_000, 8_000_000),
    st.integers(10_000, 2_000_000),
)
def test_buckets_are_those_of_torch(tensors: list[tuple[int, bool]], cap: int, first: int) -> None:
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    made = [
        torch.empty(size, dtype=torch.float16 if narrow else torch.float32, device="meta")
        for size, narrow in tensors
    ]
    order = list(range(len(made)))
    theirs, _ = dist._compute_bucket_assignment_by_size(
        made, [first, cap], [False] * len(made), order
    )
    ours = fill_buckets(
        gradients(
            *(size * (2 if narrow else 4) for size, narrow in tensors),
            dtype=tuple(int(narrow) for _, narrow in tensors),
        ),
        cap,
        first,
    )
    sizes = [sum(made[i].numel() * made[i].element_size() for i in one) for one in theirs]
    # What is left over at the end comes by type, in torch's order of types or in ours.
    assert sorted(ours.size_bytes.tolist()) == sorted(sizes)
    assert sorted(ours.tensors.tolist()) == sorted(len(one) for one in theirs)


# Finding


def test_gradients_are_found_in_the_order_of_backward(tmp_path: Path) -> None:
    context = bench(cpu_trace(tmp_path, [512, 512])).context
    found = find_gradients(context, context.graph)
    assert found is not None
    assert found.size_bytes.tolist() == [MB] * LAYERS
    # Calls: forward, then each layer's backward and its accumulation, then the optimizer.
    assert found.ready.tolist() == [3, 5, 7]


def test_a_type_of_two_bytes_has_half_the_size(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    text = (tmp_path / "cpu.json").read_text().replace('["float"]', '["c10::BFloat16"]')
    (tmp_path / "cpu.json").write_text(text)
    from stepscope import read_trace

    context = bench(read_trace(tmp_path / "cpu.json", cache=False)).context
    found = find_gradients(context, context.graph)
    assert found is not None
    assert found.size_bytes.tolist() == [MB // 2] * LAYERS
    assert trace.kind == "cpu"


def test_of_micro_batches_the_last_ones_gradients_are_summed(tmp_path: Path) -> None:
    context = bench(cpu_trace(tmp_path, [512, 512], micro_batches=3), 12_500).context
    found = find_gradients(context, context.graph)
    assert found is not None
    assert len(found) == LAYERS
    assert found.ready.tolist() == [17, 19, 21]


def test_without_shapes_there_are_none(tmp_path: Path) -> None:
    cpu_trace(tmp_path, [512, 512])
    text = (tmp_path / "cpu.json").read_text().replace('"Input Dims"', '"Nothing"')
    (tmp_path / "cpu.json").write_text(text)
    from stepscope import read_trace

    context = bench(read_trace(tmp_path / "cpu.json", cache=False)).context
    assert find_gradients(context, context.graph) is None


# One after the other


def test_a_bucket_waits_for_the_one_before_it() -> None:
    dur_ns, lost_ns = chain_buckets(
        np.array([0.0, 10.0]) * US, 100 * US, np.array([30.0, 5.0]) * US,
        np.array([30.0, 5.0]) * US, 0.0,
    )  # fmt: skip
    assert dur_ns.tolist() == [30 * US, 5 * US]
    assert lost_ns.tolist() == [0, 0]


def test_beside_compute_it_takes_longer_and_takes_from_compute() -> None:
    """Alone 20, beside 40: ready at 0, all of it beside compute that ends at 100."""
    dur_ns, lost_ns = chain_buckets(
        np.array([0.0]), 100 * US, np.array([20 * US]), np.array([40 * US]), 0.5
    )
    assert dur_ns.tolist() == pytest.approx([40 * US])
    assert lost_ns.tolist() == pytest.approx([10 * US])


def test_what_is_left_behind_compute_goes_at_its_own_speed() -> None:
    """Compute ends 10 after it began: a quarter is done by then, the rest takes 15."""
    dur_ns, _ = chain_buckets(
        np.array([90 * US]), 100 * US, np.array([20 * US]), np.array([40 * US]), 0.0
    )
    assert dur_ns.tolist() == pytest.approx([25 * US])


def test_behind_compute_nothing_is_lost() -> None:
    dur_ns, lost_ns = chain_buckets(
        np.array([100 * US]), 100 * US, np.array([20 * US]), np.array([40 * US]), 0.7
    )
    assert (dur_ns.tolist(), lost_ns.tolist()) == ([20 * US], [0])


# In the step


def exchanged(trace: Trace, *, cap_mb: float, **how: float) -> tuple[float, Bench]:
    """The step in µs with buckets of this size and nothing else that DDP does."""
    found = bench(trace)
    context = found.context
    wanted = find_gradients(context, context.graph)
    assert wanted is not None
    cap = round(cap_mb * MB)
    graph = sum_gradients(
        context.graph,
        fill_buckets(wanted, cap, cap),
        transfers(trace, **how),
        ReduceRules(on_host=context.on_host, add_ddp=False, ceilings=context.ceilings),
    )
    return step_ns(graph) / US, found


def test_on_a_cpu_one_bucket_is_summed_behind_backward(tmp_path: Path) -> None:
    step, _ = exchanged(cpu_trace(tmp_path, [512, 512]), cap_mb=25)
    assert step == pytest.approx(4500 + 100 + 3 * 1000)


def test_on_a_cpu_buckets_hide_behind_backward_but_for_the_last(tmp_path: Path) -> None:
    """A MiB takes 1100: ready at 2000, 3000 and 4000; the sums end at 3100, 4200 and 5300."""
    step, _ = exchanged(cpu_trace(tmp_path, [512, 512]), cap_mb=1)
    assert step == pytest.approx(5300 + 500, rel=0.001)


def test_what_compute_loses_lengthens_the_step(tmp_path: Path) -> None:
    """Half of 1100 is lost to each sum that runs beside backward: the first one, and what there is
    room for of the second; then all sums end one after the other."""
    free, _ = exchanged(cpu_trace(tmp_path, [512, 512]), cap_mb=1)
    shared, _ = exchanged(cpu_trace(tmp_path, [512, 512]), cap_mb=1, lost=0.5)
    assert free + 550 <= shared <= free + 1100


def test_on_a_device_a_sum_waits_for_its_gradients_kernels(tmp_path: Path) -> None:
    """The host is far ahead: kernels end at 2000, 3000, 4000, and the sums 1100 after each."""
    step, found = exchanged(gpu_trace(tmp_path, [512, 512]), cap_mb=1)
    alone = step_ns(found.context.graph) / US
    assert alone == pytest.approx(4500, rel=0.01)
    assert step == pytest.approx(alone + 5300 - 4000, rel=0.01)


def test_an_optimizer_on_the_device_starts_behind_the_last_sum(tmp_path: Path) -> None:
    step, found = exchanged(gpu_trace(tmp_path, [512, 512]), cap_mb=25)
    assert step == pytest.approx(step_ns(found.context.graph) / US + 3100, rel=0.01)


def test_ddp_itself_costs_the_host(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    context = bench(trace).context
    wanted = find_gradients(context, context.graph)
    assert wanted is not None
    free = transfers(trace, alpha_us=0, us_per_mb=0)
    steps = [
        step_ns(
            sum_gradients(
                context.graph, fill_buckets(wanted, MB, MB), free,
                ReduceRules(on_host=True, add_ddp=add_ddp, ceilings=None),
            )
        )
        for add_ddp in (False, True)
    ]  # fmt: skip
    # 450 µs a step, 60 a bucket, 15 a tensor, and 3 MiB copied out and back at 27 GB/s.
    copied = 4 * 3 * MB / 27e9 * 1e9
    assert steps[1] - steps[0] == pytest.approx(450e3 + 3 * 60e3 + 3 * 15e3 + copied, rel=0.01)


def test_statistics_of_batch_norms_are_sent_before_forward(tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    context = bench(trace).context
    wanted = find_gradients(context, context.graph)
    assert wanted is not None
    line = transfers(trace, alpha_us=1000, us_per_mb=0)
    steps = [
        step_ns(
            sum_gradients(
                context.graph, fill_buckets(wanted), line,
                ReduceRules(on_host=True, add_ddp=True, ceilings=None), statistics,
            )
        )
        for statistics in (None, NormBuffers(norms=2, size_bytes=1024))
    ]  # fmt: skip
    # Two messages, half an all-reduce each, the host's way to them, and six tensors.
    assert steps[1] - steps[0] == pytest.approx(2 * 500e3 + 60e3 + 6 * 15e3, rel=0.01)


@pytest.mark.parametrize(("stage", "volume"), [(1, 1.0), (2, 1.0), (3, 1.5)])
def test_zero_moves_so_many_times_the_bytes(stage: int, volume: float, tmp_path: Path) -> None:
    trace = gpu_trace(tmp_path, [512, 512])
    context = bench(trace).context
    wanted = find_gradients(context, context.graph)
    assert wanted is not None
    line = transfers(trace, alpha_us=0, us_per_mb=100)
    graph = shard(
        context.graph, fill_buckets(wanted, MB, MB), line,
        ReduceRules(on_host=False, add_ddp=False, ceilings=context.ceilings), stage,
    )  # fmt: skip
    moved = float(graph.tasks.dur_ns[graph.tasks.kind == 1].sum())
    assert moved == pytest.approx(volume * 3 * 100e3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_divides_the_optimizers_work(stage: int, tmp_path: Path) -> None:
    trace = cpu_trace(tmp_path, [512, 512])
    context = bench(trace).context
    wanted = find_gradients(context, context.graph)
    assert wanted is not None
    free = transfers(trace, ranks=4, alpha_us=0, us_per_mb=0)
    buckets = fill_buckets(wanted, MB, MB)
    rules = ReduceRules(on_host=True, add_ddp=False, ceilings=None)
    graph = shard(context.graph, buckets, free, rules, stage)
    launches = 60e3 * (3 if stage < 3 else 6)  # a gather for each bucket, or two
    assert step_ns(graph) == pytest.approx(4_000e3 + 125e3 + launches, rel=0.001)


# Weaving


def test_pieces_keep_their_order_and_wait_for_one_another(tmp_path: Path) -> None:
    context = bench(gpu_trace(tmp_path, [512, 512])).context
    graph, comm = context.graph, context.graph.streams
    pieces = [
        InsertedCall(before=2, stream=comm, dur_ns=7, after_compute=True),
        InsertedCall(before=2, stream=comm, dur_ns=9),
        InsertedCall(before=4, stream=0, dur_ns=0, after=1),
    ]
    woven = insert_collectives(graph, pieces, 0)
    new = np.flatnonzero(woven.tasks.row < 0)
    assert woven.tasks.dur_ns[new].tolist() == [7, 9, 0]
    assert woven.tasks.after[new].tolist() == [new[0] - 1, -1, new[1]]
    assert woven.streams == graph.streams + 1
    ends = replay(woven).ends_ns
    assert ends[new[2]] >= ends[new[1]]


def test_a_host_that_waits_takes_no_task_along(tmp_path: Path) -> None:
    context = bench(cpu_trace(tmp_path, [512, 512])).context
    pieces = [
        InsertedCall(before=1, stream=0, dur_ns=5_000 * US),
        InsertedCall(before=2, stream=0, host_waits=True),
    ]
    woven = insert_collectives(context.graph, pieces, -1)
    assert len(woven.tasks) == 1
    assert woven.calls.kind[3] == CallKind.WAIT
    # Forward ends at 1000, the task at 6000; one call of backward ran beside it.
    assert step_ns(woven) == pytest.approx(4500 * US + 5000 * US - 980 * US, rel=0.001)


def test_nothing_to_weave_is_the_same_step(tmp_path: Path) -> None:
    context = bench(cpu_trace(tmp_path, [512, 512])).context
    assert insert_collectives(context.graph, [], -1) is context.graph


def test_buckets_count_themselves() -> None:
    none = np.zeros(0, np.int32)
    assert len(Buckets(ready=none, size_bytes=none.astype(np.int64), tensors=none)) == 0
