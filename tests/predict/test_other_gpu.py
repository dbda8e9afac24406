"""Kernels and steps on another GPU: worked out on paper, and how they behave."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import stepscope
from benches import ask, bench_for
from explain.build import kernel, op, step, write
from stepscope import read_trace
from stepscope.errors import NotCapturedError, UnreadableInputError, UsageError
from stepscope.predict.engine import Bench
from stepscope.predict.other_gpu import kernel_time, retime
from stepscope.predict.other_gpu.gpu import (
    Gpu,
    GpuRow,
    ProductFit,
    Tile,
    expected_share,
    find_gpu,
    find_row,
    gpu_rows,
    other_boards,
    transfer_fit,
)
from stepscope.predict.other_gpu.step import (
    CALIBRATED,
    compare_gpus,
    link_bytes_s,
    move_context,
    move_step,
    product_shape,
    start_ns,
    table_gpus,
)
from stepscope.records.hardware import Profile
from stepscope.trace.machine_profiles import save_profile

ONE_TILE = ProductFit(
    tiles=(Tile(rows=100, columns=100, share=0.5),),
    wave=1.0,
    inner=0.0,
    split_share=1e-6,  # never worth it
    overlap=50.0,
)


def made_gpu(multiprocessors: int = 10, bandwidth: float = 100.0, **changes: Any) -> Gpu:
    """1 TFLOP/s on ten multiprocessors, 100 GB/s, no cache to speak of."""
    row = GpuRow(
        gpu="made",
        vendor="NVIDIA",
        tflops={"fp32": 0.1 * multiprocessors},
        bandwidth_gb_s=bandwidth,
        memory_gib=16,
        multiprocessors=multiprocessors,
        link="PCIe 4 x16",
        link_gb_s=64,
        generation="ampere",
        node_nm=8,
        lanes=64,
        boost_mhz=1000,
        l2_mb=0.001,
        watts=1e6,
        threads=2048,
        memory="GDDR",
    )
    gpu = Gpu(
        name="made",
        row=row,
        rates={"fp32": 1e11 * multiprocessors},
        full_rates={"fp32": 1e11 * multiprocessors},
        bytes_s=1e9 * bandwidth,
        l2_bytes_s=1e15,
        measured=frozenset(),
    )
    return replace(gpu, **changes)


def columns(*numbers: float) -> list[np.ndarray]:
    return [np.array([number]) for number in numbers]


@pytest.mark.parametrize(("multiprocessors", "ms"), [(10, 2.0), (16, 1.4), (100, 0.2)])
def test_a_product_runs_in_whole_waves_of_tiles(multiprocessors: int, ms: float) -> None:
    """1000 x 1000 by tiles of 100 x 100 is 100 blocks. A block is 2 * 100 * 100 * 500 = 1e7 FLOP,
    and a multiprocessor does 1e11 FLOP/s at a share of 0.5: 0.2 ms. Ten multiprocessors take 10
    waves, sixteen take 7 (6.25 rounded up), a hundred take one."""
    gpu = made_gpu(multiprocessors, bandwidth=1e6)
    rate = kernel_time.DtypeRate(gpu.rates["fp32"], gpu.rates["fp32"])
    shapes = np.array([[1.0, 1000.0, 1000.0, 500.0]])
    time = kernel_time.product_ms(shapes, rate, gpu, ONE_TILE)
    assert time[0] == pytest.approx(ms, rel=1e-3)


def test_bytes_move_at_the_bandwidth_and_cached_ones_at_the_caches() -> None:
    """1 GB at 100 GB/s is 10 ms. With a cache ten times as large it takes next to nothing."""
    gpu = made_gpu()
    assert kernel_time.moved_ms(np.array([1e9]), gpu)[0] == pytest.approx(10.0, rel=1e-3)
    cached = replace(gpu, row=replace(gpu.row, l2_mb=10_000))
    assert kernel_time.moved_ms(np.array([1e9]), cached)[0] < 0.01


def test_a_norm_reads_rows_twice_once_they_do_not_fit_the_cache() -> None:
    """1000 rows of 1e6 floats: 4 GB are read, read again and written. 12 GB at 10 GB/s: 1.2 s."""
    gpu = made_gpu(bandwidth=10)
    time = kernel_time.rows_ms(*columns(1000, 1e6), element_bytes=4, softmax=False, gpu=gpu)
    assert time[0] == pytest.approx(1200.0, rel=0.01)


def test_watts_hold_a_small_board_back() -> None:
    """By hand: the unit's share of the peak x ((72 W - 25 W) / (30.3 TFLOP/s x 6.1 W)) ^ 0.6."""
    fit, row = transfer_fit(), find_row("L4")
    assert row is not None
    full = fit.power.unit["fp32"] * fit.power.wide_lanes
    assert expected_share(row, "fp32", fit) == pytest.approx(full * (47 / (30.3 * 6.1)) ** 0.6)
    assert expected_share(replace(row, watts=1000), "fp32", fit) == pytest.approx(full)


def test_the_same_gpu_changes_nothing() -> None:
    for name in ("H200", "L4", "MI300X"):
        same = retime(
            op="linear", shape=(1, 512, 512, 512), dtype="bf16", ms=0.3, source=name, target=name
        )
        assert same == (0.3, 0.3, 0.3)


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        ("gelu", (8192, 3072), "fp32"),
        ("softmax", (8192, 1024), "fp32"),
        ("linear", (1, 8192, 3072, 768), "bf16"),
    ],
)
def test_a_weaker_board_of_the_same_chip_is_never_faster(
    op: str, shape: tuple[int, ...], dtype: str
) -> None:
    """However far a kernel is from the model: it is the same kernel on both."""
    for ms in (0.05, 0.5, 5.0):
        there, _, _ = retime(
            op=op,
            shape=shape,
            dtype=dtype,
            ms=ms,
            source="H200-SXM-141GB",
            target="H200-NVL-141GB",
            launch_ms=0.0,
        )
        assert there >= ms


def test_more_bandwidth_never_makes_a_copy_longer() -> None:
    source = find_gpu("A100-PCIE-40GB")
    times = []
    for bandwidth in (100.0, 200.0, 400.0, 800.0):
        target = made_gpu(108, bandwidth)
        times.append(
            retime(
                op="add", shape=(8192, 8192), dtype="fp32", ms=1.0, source=source, target=target
            )[0]
        )
    assert times == sorted(times, reverse=True)
    assert times[0] > 3.5 * times[2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_longer_time_stays_longer_and_the_interval_holds_the_time(dtype: str) -> None:
    def moved(ms: float) -> tuple[float, float, float]:
        return retime(
            op="linear",
            shape=(1, 4096, 4096, 1024),
            dtype=dtype,
            ms=ms,
            source="A100",
            target="H100",
        )

    short, long = moved(1.0), moved(2.0)
    assert short[0] < long[0]
    assert short[1] < short[0] < short[2]
    assert math.log(short[2] / short[0]) == pytest.approx(math.log(short[0] / short[1]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"op": "lineer"}, "did you mean linear"),
        ({"shape": (1, 2)}, "4 numbers"),
        ({"dtype": "fp12"}, "no fp12 rate"),
        ({"ms": 0.0}, "above 0"),
        ({"ms": math.nan}, "above 0"),
        ({"target": "H1000"}, "did you mean"),
    ],
)
def test_a_wrong_question_is_a_usage_error(wrong: dict[str, Any], words: str) -> None:
    asked = {
        "op": "linear",
        "shape": (1, 2, 3, 4),
        "dtype": "fp32",
        "ms": 1.0,
        "source": "A100",
        "target": "H100",
    }
    with pytest.raises(UsageError, match=words):
        retime(**(asked | wrong))


def test_every_gpu_is_found_by_its_name_and_short_names_take_the_strongest_board() -> None:
    for row in gpu_rows():
        found = find_row(row.gpu)
        assert found is not None
        assert found.gpu == row.gpu
    assert find_gpu("NVIDIA H200").name == "H200-SXM-141GB"
    assert find_gpu("H100").name == "H100-SXM5-80GB"
    assert "H100-PCIE-80GB" in other_boards("H100")
    assert other_boards("L4") == ()


def test_rates_are_never_above_what_the_data_sheet_allows() -> None:
    for gpu in table_gpus():
        for dtype, rate in gpu.rates.items():
            assert 0.15 < rate / (1e12 * gpu.row.tflops[dtype]) < 1.1, (gpu.name, dtype)
        assert 0.6 < gpu.bytes_s / (1e9 * gpu.row.bandwidth_gb_s) < 1


def test_a_data_sheet_in_a_file_is_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    row = {name: getattr(made_gpu().row, name) for name in GpuRow.__struct_fields__}
    path.write_text(json.dumps(row))
    assert find_gpu(str(path)).row.watts == 1e6
    path.write_text(json.dumps(row | {"watts": 0}))
    with pytest.raises(UnreadableInputError, match="above 0"):
        find_gpu(str(path))
    path.write_text(json.dumps({"gpu": "x"}))
    with pytest.raises(UnreadableInputError, match="does not describe a GPU"):
        find_gpu(str(path))
    path.write_text("[1]")
    with pytest.raises(UnreadableInputError, match="JSON object"):
        find_gpu(str(path))
    with pytest.raises(UnreadableInputError, match=r"nowhere\.json"):
        find_gpu(str(tmp_path / "nowhere.json"))


def test_a_calibration_from_there_replaces_the_rates_and_takes_a_quarter_of_the_doubt(
    tmp_path: Path,
) -> None:
    path = save_profile(profile_of("NVIDIA L4", 50e12, 250e9))
    gpu = find_gpu(str(path))
    assert gpu.calibrated
    assert gpu.name == "L4"
    assert gpu.bytes_s == 250e9
    bench = product_step(tmp_path)
    plain = move_context(bench.context, find_gpu("L4"))
    calibrated = move_context(bench.context, gpu)
    assert calibrated.doubt == pytest.approx(plain.doubt * CALIBRATED, rel=0.1)
    path = save_profile(profile_of("Some CPU", 1e12, 1e10))
    with pytest.raises(UnreadableInputError, match="not in the table"):
        find_gpu(str(path))


def profile_of(device: str, flops: float, bytes_s: float) -> Profile:
    return Profile(
        host=f"host-{device[-2:]}",
        device=device,
        kind="cuda",
        torch="2.11",
        when_unix=1.0,
        world_size=1,
        backend=None,
        threads=1,
        matmul_flops={"bf16": flops, "fp32": flops / 4},
        copy_bytes_s=bytes_s,
    )


def product_step(folder: Path, device: str = "NVIDIA H200", every_us: float = 600.0) -> Bench:
    """Three steps of four products, a copy and an unknown kernel; the device is busy throughout."""
    shapes, dtypes = [[4096, 4096], [4096, 4096]], ["c10::BFloat16", "c10::BFloat16"]
    events: list[dict[str, Any]] = []
    for number in range(3):
        at = number * 6 * every_us
        events += step(number, start=at, dur=6 * every_us)
        for place in range(6):
            name, inputs = "aten::mm", (shapes, dtypes)
            if place >= 4:
                name, inputs = ("aten::relu", ([[64, 1024]], ["float"]))
            events += op(name, start=at, dur=20, shapes=inputs[0], dtypes=inputs[1])
            of = "nvjet_tst_bf16" if place < 4 else "relu_kernel"
            events += kernel(of, start=at + 12, dur=every_us - 20, launched_at=at + 5)
            at += every_us
    return bench_for(read_trace(write(folder / "products.json", events, device=device)))


def test_a_step_on_its_own_gpu_is_unchanged(tmp_path: Path) -> None:
    bench = product_step(tmp_path)
    same = ask(bench, "gpu=H200")
    now = bench.predict([])
    assert same.predicted_ms == now.predicted_ms
    assert (same.low_ms, same.high_ms) == (now.low_ms, now.high_ms)
    moved = move_step(bench.context, find_gpu("H200"), find_gpu("H200"))
    assert (moved.dur_ns == bench.context.graph.tasks.dur_ns).all()


def test_a_slower_gpu_takes_longer_and_the_whole_is_its_parts(tmp_path: Path) -> None:
    bench = product_step(tmp_path)
    context = bench.context
    moved = move_context(context, find_gpu("L4"))
    tasks = moved.context.graph.tasks
    assert (tasks.dur_ns > context.graph.tasks.dur_ns).all()
    step_ms, low, high = bench.interval_ms(moved.context, moved.doubt)
    assert low < step_ms < high
    assert step_ms >= tasks.dur_ns.sum() / 1e6
    assert step_ms == pytest.approx((tasks.dur_ns + tasks.spacing_ns).sum() / 1e6, rel=0.05)
    assert 0 < moved.modelled_share < 1 or moved.modelled_share == 0


def test_gpus_and_whatif_say_the_same(tmp_path: Path) -> None:
    bench = product_step(tmp_path)
    (row,) = compare_gpus(bench, [find_gpu("L4")]).gpus
    whatif = ask(bench, "gpu=L4")
    assert row.step_ms == pytest.approx(whatif.predicted_ms)
    assert row.low_ms == pytest.approx(whatif.low_ms)
    assert row.high_ms == pytest.approx(whatif.high_ms)


def test_a_gpu_without_the_steps_units_is_refused(tmp_path: Path) -> None:
    bench = product_step(tmp_path)
    prediction = ask(bench, "gpu=T4")
    assert not prediction.applied
    assert "no bf16 units" in prediction.refused[0]
    (row,) = compare_gpus(bench, [find_gpu("T4")]).gpus
    assert row.step_ms is None
    assert "bf16" in row.why


def test_a_product_without_an_operator_goes_by_its_kernels_name(tmp_path: Path) -> None:
    """As in a CUDA graph: by the rates of products in its dtype, not by bandwidths."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        events += step(number, start=number * 1000, dur=1000)
        for place, name in enumerate(("nvjet_sm90_tst_192x128_64x5_NNT", "some_kernel")):
            at = number * 1000 + 500 * place
            events += kernel(name, start=at + 12, dur=480, launched_at=at + 5)
    trace = read_trace(write(tmp_path / "graph.json", events, device="NVIDIA H200"))
    context = bench_for(trace).context
    here, there = find_gpu("H200"), find_gpu("A100-SXM4-80GB")
    moved = move_step(context, here, there)
    named, other = moved.dur_ns[:2] / context.graph.tasks.dur_ns[:2]
    assert named == pytest.approx(here.rates["bf16"] / there.rates["bf16"], rel=0.02)
    assert other == pytest.approx(here.bytes_s / there.bytes_s, rel=0.02)
    assert moved.unknown_share == 1.0
    assert move_step(context, here, find_gpu("T4")).missing == ("bf16",)


def test_a_faster_gpu_leaves_the_host_to_decide(tmp_path: Path) -> None:
    """On an L4 the products take nearly all of the step; the host needs the same everywhere."""
    bench = product_step(tmp_path, device="NVIDIA L4", every_us=40.0)
    moved = move_context(bench.context, find_gpu("B200"))
    assert moved.decides == "host"
    assert moved.context.graph.host_ns == bench.context.graph.host_ns
    assert any("host-bound" in line for line in moved.assumptions)


def test_an_unknown_gpu_names_the_nearest(tmp_path: Path) -> None:
    bench = product_step(tmp_path)
    with pytest.raises(UsageError, match=r"did you mean .*H100.*calibrate"):
        ask(bench, "gpu=HH100")
    with pytest.raises(UsageError, match="give a GPU or a file"):
        ask(bench, "gpu")


def test_a_trace_of_an_unknown_gpu_or_of_none_is_refused(tmp_path: Path, golden: Path) -> None:
    bench = product_step(tmp_path, device="NVIDIA Whatever 9000")
    assert "not in the table" in ask(bench, "gpu=L4").refused[0]
    with pytest.raises(NotCapturedError, match="no GPU"):
        stepscope.whatif(golden / "cpu_step.json.gz", "gpu=L4")


def test_precision_is_priced_on_the_other_gpu(golden: Path) -> None:
    """tf32 makes products faster on an L4 too, and both changes say so together."""
    alone = stepscope.whatif(golden / "h200-resnet18", "gpu=L4")
    both = stepscope.whatif(golden / "h200-resnet18", "gpu=L4", "precision=tf32")
    assert both.predicted_ms < alone.predicted_ms
    assert len(both.applied) == 2


def test_links_set_the_pace_of_collectives() -> None:
    h100, l4 = find_gpu("H100"), find_gpu("L4")
    assert link_bytes_s(h100, 8) > 5 * link_bytes_s(l4, 2)
    assert link_bytes_s(l4, 2) > link_bytes_s(l4, 8) > 0
    assert 1e3 < start_ns(l4) < 1e5


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], (1, 2, 5, 3)),
        ("aten::addmm", [[5], [2, 3], [3, 5]], (1, 2, 5, 3)),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], (7, 2, 5, 3)),
        ("aten::linear", [[7, 2, 3], [5, 3]], (1, 14, 5, 3)),
        ("aten::mv", [[2, 3], [3]], None),
    ],
)
def test_shapes_of_products(name: str, dims: list[list[int]], expected: Any) -> None:
    from stepscope.explain.flops.call import Call

    assert product_shape(Call(name, dims, ["float"] * len(dims), [])) == expected


@pytest.mark.parametrize("name", ["gpt2s_b8_fp32", "mlp_b32_fp32_loop"])
def test_recorded_steps_on_their_own_gpu(shared: Path, name: str) -> None:
    path = shared / "traces/h200" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    prediction = stepscope.whatif(path, "gpu=H200")
    assert prediction.predicted_ms == prediction.baseline_ms


@pytest.mark.slow
@pytest.mark.parametrize(("op", "most"), [("linear", 0.12), ("bmm", 0.2)])
def test_measured_products_carry_over_between_generations(
    shared: Path, op: str, most: float
) -> None:
    """T4 -> A100 80 GB on shapes of real transformers, times that others measured."""
    path = shared / "gpu_transfer/matmul_fp32.csv.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    source, target = "T4", "A100-PCIE-80GB"
    times: dict[tuple[float, ...], dict[str, float]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["op"] == op and row["gpu"] in (source, target):
                shape = tuple(float(row[name]) for name in ("batch", "m", "n", "k"))
                times.setdefault(shape, {})[row["gpu"]] = float(row["ms"])
    both = [(shape, one) for shape, one in times.items() if len(one) == 2 and one[target] > 0.1]
    assert len(both) > 100
    errors = []
    for shape, one in both[:: len(both) // 100]:
        ms, _, _ = retime(
            op=op, shape=shape, dtype="fp32", ms=one[source], source=source, target=target
        )
        errors.append(abs(ms / one[target] - 1))
    assert sum(errors) / len(errors) < most
