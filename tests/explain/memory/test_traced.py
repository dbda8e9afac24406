"""Memory from a trace's allocator events: every byte of a hand-written training is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches import analyse
from stepscope import read_trace
from stepscope.explain.memory.lifetimes import find_lifetimes
from stepscope.explain.rank import explain_memory
from stepscope.records.memory import CATEGORIES, Memory
from stepscope.records.rank import MemoryInputs

from .. import build
from . import training


@pytest.fixture
def account(read):
    def explaining(*events: build.Events, limit: int | None = None) -> Memory:
        found = explain_memory(analyse(read(*events), memory=MemoryInputs(limit_bytes=limit)))
        assert found is not None
        return found

    return explaining


def test_the_peak_is_the_allocators_and_categories_add_up_to_it(account):
    memory = account(*training.train())
    assert memory.source == "trace"
    assert memory.peak_bytes == training.PEAK
    assert memory.reserved_bytes == training.RESERVED
    assert sum(held or 0 for held in memory.categories.values()) == memory.peak_bytes
    assert list(memory.categories) == list(CATEGORIES)


def test_each_block_is_what_its_life_says(account):
    memory = account(*training.train())
    assert memory.phase == "optimizer"
    assert memory.categories == {
        "parameters": training.PARAMETERS,
        "gradients": training.PARAMETERS,
        "optimizer": training.STATE,
        "activations": 0,
        "buffers": None,
        "temporaries": training.IN_STEP,
        "other": training.WORKSPACE + training.LOSS,
    }


def test_activations_live_from_forward_to_backward(account):
    memory = account(*training.train())
    line = memory.timeline
    assert line is not None
    assert line.of == "ProfilerStep#12"
    at = {t: i for i, t in enumerate(line.time_ns)}
    activations = line.categories["activations"]
    assert activations[at[20_000]] == 0
    assert activations[at[110_000]] == training.ACTIVATIONS
    assert activations[at[430_000]] == training.ACTIVATIONS
    assert activations[at[440_000]] == 0
    assert line.categories["temporaries"][at[120_000]] == training.TEMPORARY
    assert line.categories["temporaries"][at[410_000]] == training.IN_BACKWARD
    assert line.categories["gradients"][at[20_000]] == 0
    for place, allocated in enumerate(line.allocated_bytes):
        assert sum(levels[place] for levels in line.categories.values()) == allocated
    assert [phase.name for phase in line.phases] == ["forward", "backward", "optimizer"]


def test_what_was_there_before_is_not_told_apart_where_gradients_stay(account):
    memory = account(*training.train(keeps_gradients=True))
    assert memory.categories["parameters"] is None
    assert memory.categories["optimizer"] is None
    assert memory.categories["gradients"] is None
    held = training.KEPT + training.PARAMETERS + training.LOSS
    assert memory.categories["other"] == held
    assert any("`stepscope run` separates them" in note for note in memory.notes)


def test_an_optimizer_of_unknown_state_leaves_its_state_in_other(account):
    memory = account(*training.train(optimizer="SGD"))
    assert memory.categories["parameters"] == training.PARAMETERS
    assert memory.categories["optimizer"] is None
    assert memory.categories["other"] == training.STATE + training.WORKSPACE + training.LOSS


def test_who_allocated_what_is_held_at_the_peak(account):
    memory = account(*training.train())
    by = {(site.operator, site.category): site for site in memory.by_site}
    assert sum(site.size_bytes for site in memory.by_site) == memory.peak_bytes
    gradients = by["AddmmBackward0", "gradients"]
    assert gradients.size_bytes == training.PARAMETERS
    # backward has no Python around it: the forward call's line stands for it
    assert (gradients.file, gradients.line, gradients.function) == ("train.py", 7, "train")
    assert by["aten::nll_loss", "other"].size_bytes == training.LOSS
    assert by["(before the trace began)", None].size_bytes == training.KEPT


def test_activations_are_by_module_where_modules_were_recorded(account):
    events = [*training.train()]
    peak_in_forward = training.Recorder(10_000_000)
    peak_in_forward.move(5000, 9_000_000, 0xA000)
    peak_in_forward.move(5410, -9_000_000, 0xA000, build.AUTOGRAD)
    backward = "autograd::engine::evaluate_function: Mm"
    memory = account(
        *events[:-1],
        build.frame("nn.Module: Big_3", start=4990, dur=100),
        build.op("aten::mm", start=4995, dur=50),
        build.op(backward, start=5400, dur=50, thread=build.AUTOGRAD),
        peak_in_forward.events,
    )
    (module,) = memory.by_module
    assert (module.module, module.size_bytes, module.tensors) == ("Big_3", 9_000_000, 1)


def test_the_batch_and_the_largest_one_come_from_shapes_and_lines(account):
    memory = account(*training.train(), limit=100_000)
    fit = memory.largest_batch
    assert fit is not None
    assert (fit.batch, fit.limit_from) == (8, "given")
    (line,) = fit.lines
    assert line.fixed_bytes + line.scaling_bytes == memory.peak_bytes
    # the peak is in the optimizer's step: only the loss grows with the batch
    assert line.scaling_bytes == training.LOSS


def test_a_trace_without_allocator_events_tells_nothing(read):
    trace = read(build.op("aten::mm", start=0, dur=5))
    assert find_lifetimes(trace) is None
    assert explain_memory(analyse(trace)) is None


def test_on_the_cpu_what_was_there_before_is_not_known(read):
    recorder = training.Recorder(0, device_type=0, reserved=0)
    recorder.move(1, 4096, 0x1)
    recorder.move(3, -4096, 0x1)
    trace = read(build.op("aten::mm", start=0, dur=5), recorder.events, device=None)
    memory = explain_memory(analyse(trace))
    assert memory is not None
    assert memory.device == "cpu"
    assert (memory.peak_bytes, memory.reserved_bytes) == (4096, None)
    assert memory.categories["temporaries"] == 4096
    assert memory.categories["parameters"] is None


def test_a_failed_allocation_or_a_lost_event_is_said(account):
    events = training.train(2)
    del events[-1][5]
    memory = account(*events)
    assert any("missing from the trace" in note for note in memory.notes)
    assert sum(held or 0 for held in memory.categories.values()) == memory.peak_bytes


@given(
    moves=st.lists(
        st.tuples(
            st.integers(0, 2900),
            st.integers(-5000, 5000),
            st.integers(0, 6),
            st.sampled_from((build.MAIN, build.AUTOGRAD, build.WORKER)),
        ),
        min_size=1,
        max_size=40,
    ),
    totals=st.booleans(),
)
def test_whatever_events_there_are_categories_add_up_to_the_peak(tmp_path, moves, totals):
    """Releases of nothing, allocations on top of others, events without totals."""
    recorder = training.Recorder(10_000)
    for at, size, address, thread in sorted(moves):
        recorder.move(at, size, 0x100 * address, thread)
    for event in recorder.events if not totals else []:
        del event["args"]["Total Allocated"]
    path = build.write(tmp_path / "trace.json", *training.train(3)[:-1], recorder.events)
    trace = read_trace(path, cache=False)
    memory = explain_memory(analyse(trace))
    if memory is None:
        assert not any(size for _, size, _, _ in moves)
        return
    assert memory.peak_bytes >= 0 or totals
    assert sum(held or 0 for held in memory.categories.values()) == memory.peak_bytes
    line = memory.timeline
    assert max(line.allocated_bytes) == memory.peak_bytes


def test_gpt2_on_an_h200_agrees_with_torchs_own_peak(shared):
    """truth.json: torch.cuda.max_memory_allocated in the same process, 163,109,376 parameters."""
    path = shared / "traces/h200/gpt2s_b8_bf16_stack.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    trace = read_trace(path)
    memory = explain_memory(analyse(trace))
    assert memory is not None
    assert memory.peak_bytes == 9166228992
    assert sum(held or 0 for held in memory.categories.values()) == memory.peak_bytes
    parameters = 4 * 163_109_376
    assert memory.categories["parameters"] == pytest.approx(parameters, rel=0.02)
    assert memory.categories["optimizer"] == pytest.approx(2 * parameters, rel=0.02)
    assert memory.theory is not None
    formula = memory.theory.activations
    assert formula is not None
    assert formula.total_bytes == pytest.approx(memory.categories["activations"], rel=0.01)


def test_allocations_without_a_host_event_around_them_have_no_site_but_count(account):
    memory = account(
        *(
            training.instant(10 * n, 512, n + 1, allocated=512 * (n + 1), reserved=4096)
            for n in range(3)
        ),
        build.kernel("k", start=5, dur=20),
    )
    assert [(site.operator, site.size_bytes) for site in memory.by_site] == [("(unknown)", 1536)]
