"""The host's part in a compiled step, and questions that a compiler cannot ask."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from benches import ask, bench_for
from explain.build import call, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.compiled_step import (
    compile_step,
    count_operators,
    find_causal_attention,
    find_mask_checks,
    in_passes,
    relaunch,
)
from stepscope.predict.step_context import Parameters
from stepscope.predict.whatifs import parse_setting

if TYPE_CHECKING:
    from pathlib import Path

    from explain.build import Events
    from stepscope.predict.engine import Bench

STEP_US = 4000.0
FULL: dict[str, Any] = {"shapes": [[1024, 1024]], "dtypes": ["float"]}
PAIR: dict[str, Any] = {"shapes": [[1024, 1024], [1024, 1024]], "dtypes": ["float", "float"]}


def _launched(name: str, at: float, start: float, dur: float) -> Events:
    shapes = PAIR if name == "mm" else FULL
    return [
        *op(f"aten::{name}", start=at, dur=40, **shapes),
        *kernel(name, start=max(start, at + 20), dur=dur, launched_at=at + 10),
    ]


def _bench(folder: Path, *, product_us: float = 5, branches: int = 0) -> Bench:
    """A product, ten loops that fuse, a product; 100 us of the host for each, and a view."""
    events: Events = []
    length = 2 * product_us + 2000
    for number in range(3):
        at = number * length
        events += step(number, start=at, dur=length)
        events += _launched("mm", at + 10, at, product_us)
        free = at + 30 + product_us
        for place in range(10):
            here = at + 100 * (place + 1)
            events += op("aten::view", start=here, dur=5, **FULL)
            events += _launched("relu" if place % 2 else "neg", here + 10, free + 6 * place, 5)
        for place in range(branches):
            events += op("aten::is_nonzero", start=at + 170 + 100 * place, dur=5)
        events += _launched("mm", at + 1110, free + 60, product_us)
        events += call("cudaStreamSynchronize", start=at + 1160, dur=length - 1170)
    return bench_for(read_trace(write(folder / "made.json", events, device="NVIDIA H200")))


def test_operators_and_branches_between_the_first_launch_and_the_last(tmp_path: Path) -> None:
    """The first product's launch is 10 us after the operator that makes it: ten views, ten loops
    and one product follow, and the branches."""
    plain = count_operators(_bench(tmp_path).context)
    assert (plain.operators, plain.branches) == (21, 0)
    split = count_operators(_bench(tmp_path, branches=3).context)
    assert (split.operators, split.branches) == (24, 3)


def test_the_host_takes_its_pace_and_counts_launches_and_graphs(tmp_path: Path) -> None:
    """Three launches and one graph of a model without parameters. The pace: 12 launches, of which
    each counts as eight operators, and 10 views; an unusual pace counts half."""
    context = _bench(tmp_path).context
    compiled = compile_step(context)
    assert (compiled.calls, compiled.launches) == (3, 3)
    before, after = context.graph.calls, relaunch(context, compiled, graphed=False)
    seen_ns = float((before.gap_ns + before.call_ns).sum()) / (21 + 7 * 12)
    calls = after.graph.calls
    launching = float((calls.gap_ns + calls.call_ns)[in_passes(calls)].sum())
    assert launching == pytest.approx((seen_ns * 2100) ** 0.5 * (14 * 3 + 270), rel=0.01)


def test_an_unusual_pace_is_doubtful(tmp_path: Path) -> None:
    """The host paces the step. Its pace is 17.8 us per operator, where 2.1 us is usual."""
    context = _bench(tmp_path).context
    before = context.graph.calls
    seen_ns = float((before.gap_ns + before.call_ns).sum()) / (21 + 7 * 12)
    doubt = relaunch(context, compile_step(context), graphed=False).doubt
    half = 0.5 * math.log(seen_ns / 2100)
    assert 0.8 * half < doubt < math.hypot(0.2, half)  # a part of the step is no launching


def test_parameters_take_the_host_longer_where_they_are_cast(tmp_path: Path) -> None:
    known = Parameters(tensors=8, elements=8 * 1024, shapes=((1024,),) * 8)
    context = replace(_bench(tmp_path).context, parameters=known)
    compiled = compile_step(context)
    assert compiled.casts == 0
    times = []
    for casts in (1, 2):
        calls = relaunch(context, replace(compiled, casts=casts), graphed=False).graph.calls
        times.append(float((calls.gap_ns + calls.call_ns)[in_passes(calls)].sum()))
    plain, cast = 5 * 3 + 17 * 8 + 270, 5 * 3 + 45 * 8 + 270
    assert times[1] / times[0] == pytest.approx(cast / plain, rel=0.01)


def _bench_of(folder: Path, name: str, dur: float, **described: Any) -> Bench:
    """A product, one operator of `dur` us, a product."""
    events: Events = []
    for number in range(3):
        at = number * 2000.0
        events += step(number, start=at, dur=2000)
        events += _launched("mm", at + 10, at, 50)
        events += op(f"aten::{name}", start=at + 100, dur=40, **described)
        events += kernel(name, start=at + 120, dur=dur, launched_at=at + 110)
        events += _launched("mm", at + 200, at + 130 + dur, 50)
        events += call("cudaStreamSynchronize", start=at + 300, dur=1690)
    return bench_for(read_trace(write(folder / "one.json", events, device="NVIDIA H200")))


def _compiled_ns(bench: Bench) -> float:
    return float(compile_step(bench.context).dur_ns[1])


def test_sums_over_all_rows_move_their_bytes_more_slowly(tmp_path: Path) -> None:
    shapes = {"shapes": [[8192, 1024], [], []], "dtypes": ["float", "ScalarList", "Scalar"]}
    bench = _bench_of(tmp_path, "sum", 100, concrete=["", "[0]", "False"], **shapes)
    assert bench.context.ceilings is not None
    rate = 0.8 * (bench.context.ceilings.bytes_s or 0)
    moved = 4 * 8192 * 1024
    assert _compiled_ns(bench) == pytest.approx(2 * 1500 + 1.8 * moved / rate * 1e9, rel=1e-3)


def test_elements_added_one_by_one_may_take_longer_than_without_the_compiler(
    tmp_path: Path,
) -> None:
    shapes = {
        "shapes": [[8192, 64], [], [8192, 1024], [8192, 1024]],
        "dtypes": ["float", "Scalar", "long int", "float"],
    }
    bench = _bench_of(tmp_path, "scatter_add_", 30, concrete=["", "-1", "", ""], **shapes)
    assert bench.context.ceilings is not None
    rate = 0.8 * (bench.context.ceilings.bytes_s or 0)
    elements = 8192 * 1024
    wanted = 1500 + (4 + 48) * elements / rate * 1e9
    assert wanted > 30e3
    assert _compiled_ns(bench) == pytest.approx(wanted, rel=1e-3)


def test_each_branch_is_one_more_graph_to_enter(tmp_path: Path) -> None:
    plain, split = (_bench(tmp_path, branches=many).context for many in (0, 2))
    once = relaunch(plain, compile_step(plain), graphed=True).graph.host_ns
    thrice = relaunch(split, compile_step(split), graphed=True).graph.host_ns
    assert thrice > 1.8 * once


def test_a_step_that_the_host_paces_points_to_cuda_graphs(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    plain, graphed = (ask(bench, f"compile={mode}") for mode in ("default", "reduce-overhead"))
    words = plain.assumptions[-1]
    assert words.startswith(
        "compile=default does not make this step faster: the compiled step is host-bound"
    )
    assert "compile=reduce-overhead" in words
    assert not any("host-bound" in one for one in graphed.assumptions)


def test_a_step_that_the_device_paces_does_not(tmp_path: Path) -> None:
    found = ask(_bench(tmp_path, product_us=50_000), "compile")
    assert not any("host-bound" in one for one in found.assumptions)


def test_a_host_that_nearly_paces_the_step_makes_it_doubtful(tmp_path: Path) -> None:
    """Kernels of the products as long as the host's calls, and much longer."""
    widths = []
    for product_us in (2500.0, 50_000.0):
        context = _bench(tmp_path, product_us=product_us).context
        widths.append(relaunch(context, compile_step(context), graphed=False).doubt)
    assert widths[0] > 0.05
    assert widths[1] < 0.02


_ATTENTION = "aten::scaled_dot_product_attention"
ATTENTION: dict[str, Any] = {
    "shapes": [[8, 12, 512, 64]] * 3 + [[]] * 5,
    "dtypes": ["c10::BFloat16"] * 3 + ["", *["Scalar"] * 4],
}


def _with_attention(
    folder: Path, *, asks_at: float | None, causal: bool = True, dur: float = 300
) -> Bench:
    """A product, attention of `dur` us, two loops; a question about a tensor of the device."""
    flag = ["", "", "", "", "0.", str(causal), "0.125", "False"]
    fused = "aten::_scaled_dot_product_cudnn_attention"
    events: Events = []
    length = dur + 1500
    for number in range(3):
        at = number * length
        events += step(number, start=at, dur=length)
        if asks_at is not None:
            events += op("aten::is_nonzero", start=at + asks_at, dur=60)
            events += call("cudaStreamSynchronize", start=at + asks_at + 5, dur=40)
        events += _launched("mm", at + 200, at, 50)
        events += op(_ATTENTION, start=at + 400, dur=50, concrete=flag, **ATTENTION)
        events += op(fused, start=at + 401, dur=45, **ATTENTION)
        events += kernel("sdpa_flash", start=at + 430, dur=dur, launched_at=at + 410)
        events += _launched("relu", at + 800, at + 440 + dur, 10)
        events += _launched("neg", at + 900, at + 455 + dur, 10)
        events += call("cudaStreamSynchronize", start=at + 950, dur=length - 960)
    return bench_for(read_trace(write(folder / "made.json", events, device="NVIDIA H200")))


def test_a_question_about_the_inputs_goes_and_causal_attention_takes_longer(
    tmp_path: Path,
) -> None:
    context = _with_attention(tmp_path, asks_at=100).context
    assert find_mask_checks(context).sum() == 1
    causal = find_causal_attention(context)
    assert context.graph.tasks.dur_ns[causal].tolist() == pytest.approx([300e3])
    assert compile_step(context).dur_ns[causal].tolist() == pytest.approx([1.9 * 300e3])


@pytest.mark.parametrize(
    "changed", [{"asks_at": None}, {"asks_at": 700}, {"asks_at": 100, "causal": False}]
)
def test_attention_stays_as_it_is_without_a_question_before_or_a_flag(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """A question after the first product is about results, and stays."""
    context = _with_attention(tmp_path, **changed).context
    assert compile_step(context).dur_ns.max() == pytest.approx(300e3)


def test_attention_to_everything_may_lose_its_fused_kernel(tmp_path: Path) -> None:
    """Nearly the whole step: the interval is wider than that of causal attention, and says why."""
    setting = [parse_setting("compile=reduce-overhead")]
    plain, causal = (
        _with_attention(tmp_path, asks_at=None, causal=causal, dur=50_000).predict(setting)
        for causal in (False, True)
    )
    assert plain.predicted_ms == causal.predicted_ms
    assert plain.high_ms > 1.5 * causal.high_ms
    assert any(one.startswith("attention stays one fused call") for one in plain.assumptions)
    assert not any(one.startswith("attention stays") for one in causal.assumptions)
