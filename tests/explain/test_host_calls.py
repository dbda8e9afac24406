"""Time by what the host called: operators, modules, Python functions, blocking calls."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.host_calls import is_library, place_of, user_frames
from stepscope.records.explanation import Operator, RankExplanation

from .build import AUTOGRAD, call, frame, graph, kernel, op
from .conftest import Explain, Read

# Host and device time by operator and input shapes.


def row(rank: RankExplanation, name: str) -> Operator:
    (found,) = (each for each in rank.operators if each.name == name)
    return found


def times(operator: Operator) -> tuple[int, int, int, int, int]:
    """calls, then µs: host total, host self, device total, device self."""
    return (
        operator.calls,
        operator.host_total_ns // 1000,
        operator.host_self_ns // 1000,
        operator.device_total_ns // 1000,
        operator.device_self_ns // 1000,
    )


def test_self_excludes_operators_inside_and_total_includes_them(explained: Explain) -> None:
    # linear 0-20 [addmm 5-15 -> gemm 40 µs], launching relu 8 µs itself at 17
    rank = explained(
        op("aten::linear", start=0, dur=20),
        op("aten::addmm", start=5, dur=10),
        kernel("gemm", start=30, dur=40, launched_at=6, launch_dur=2),
        kernel("relu", start=70, dur=8, launched_at=17),
    )
    assert times(row(rank, "aten::linear")) == (1, 20, 10, 48, 8)
    assert times(row(rank, "aten::addmm")) == (1, 10, 10, 40, 40)


def test_runtime_calls_and_python_count_as_the_operators_own_time(explained: Explain) -> None:
    rank = explained(
        op("aten::item", start=0, dur=20),
        call("cudaStreamSynchronize", start=2, dur=10),
        frame("train.py(1): hook", start=13, dur=5),
        kernel("a", start=30, dur=1, launched_at=25),
    )
    assert times(row(rank, "aten::item")) == (1, 20, 20, 0, 0)


def test_all_kernels_of_a_graph_belong_to_the_operator_that_launched_it(
    explained: Explain,
) -> None:
    rank = explained(
        op("graph_replay", start=0, dur=20),
        graph([kernel("a", start=30, dur=4), kernel("b", start=40, dur=5)], launched_at=10),
    )
    assert times(row(rank, "graph_replay")) == (1, 20, 20, 9, 9)


def test_unlinked_work_belongs_to_no_operator(explained: Explain) -> None:
    rank = explained(op("aten::mm", start=0, dur=20), kernel("a", start=5, dur=4))
    assert times(row(rank, "aten::mm")) == (1, 20, 20, 0, 0)


def test_calls_with_the_same_shapes_and_types_are_one_row(explained: Explain) -> None:
    small, large = [[2, 2], [2, 2]], [[8, 8], [8, 8]]
    rank = explained(
        op("aten::mm", start=0, dur=10, shapes=small, dtypes=["float", "float"]),
        op("aten::mm", start=10, dur=12, shapes=small, dtypes=["float", "float"]),
        op("aten::mm", start=30, dur=50, shapes=large, dtypes=["float", "float"]),
        op("aten::mm", start=80, dur=5, shapes=small, dtypes=["c10::Half", "c10::Half"]),
        kernel("k", start=90, dur=1, launched_at=85),
    )
    rows = {(o.shapes, o.dtypes): (o.calls, o.host_total_ns) for o in rank.operators}
    assert rows == {
        ("[[2, 2], [2, 2]]", '["float", "float"]'): (2, 22_000),
        ("[[8, 8], [8, 8]]", '["float", "float"]'): (1, 50_000),
        ("[[2, 2], [2, 2]]", '["c10::Half", "c10::Half"]'): (1, 5_000),
    }


def test_recursion_is_counted_once_in_totals(explained: Explain) -> None:
    # f 0-30 [f 5-25 [f 10-20 -> kernel 7]]: total 30 once, self 10 + 10 + 10
    rank = explained(
        op("f", start=0, dur=30),
        op("f", start=5, dur=20),
        op("f", start=10, dur=10),
        kernel("k", start=40, dur=7, launched_at=12),
    )
    assert times(row(rank, "f")) == (3, 30, 30, 7, 7)


def test_a_call_inside_one_with_other_shapes_keeps_its_own_total(explained: Explain) -> None:
    # two rows of the table: the inner one's total is its own 10 µs, not 0
    rank = explained(
        op("aten::to", start=0, dur=30, shapes=[[4]]),
        op("aten::to", start=5, dur=10, shapes=[[2]]),
        kernel("k", start=40, dur=7, launched_at=6),
    )
    rows = {o.shapes: times(o) for o in rank.operators}
    assert rows == {"[[4]]": (1, 30, 20, 7, 0), "[[2]]": (1, 10, 10, 7, 7)}


def test_self_times_add_up_to_the_outermost_operators(explained: Explain) -> None:
    rank = explained(
        op("a", start=0, dur=30),
        op("b", start=1, dur=20),
        op("c", start=2, dur=3),
        op("b", start=40, dur=5),
        kernel("k", start=100, dur=9, launched_at=3, launch_dur=0.5),
        kernel("k", start=110, dur=5, launched_at=41),
    )
    assert sum(o.host_self_ns for o in rank.operators) == 35_000
    assert sum(o.device_self_ns for o in rank.operators) == 14_000


def test_longest_device_time_comes_first_then_longest_host_time(explained: Explain) -> None:
    rank = explained(
        op("quick", start=0, dur=1),
        op("slow on the host", start=10, dur=90),
        op("slow on the device", start=110, dur=2),
        kernel("k", start=120, dur=50, launched_at=111, launch_dur=0.5),
    )
    assert [o.name for o in rank.operators] == ["slow on the device", "slow on the host", "quick"]


# Time by nn.Module: forward as called, backward as linked.


def table(rank: RankExplanation) -> dict[str, tuple[int, int, int, int, int]]:
    """name -> calls, then µs: host total, host self, forward device, backward device."""
    return {
        m.name: (
            m.calls,
            m.host_total_ns // 1000,
            m.host_self_ns // 1000,
            m.forward_device_ns // 1000,
            m.backward_device_ns // 1000,
        )
        for m in rank.modules
    }


def test_forward_device_time_reaches_every_module_around_the_launch(explained: Explain) -> None:
    # Net 0-50 [Linear 10-30 -> 20 µs], Net itself launches 3 µs
    rank = explained(
        frame("nn.Module: Net_0", start=0, dur=50),
        frame("nn.Module: Linear_0", start=10, dur=20),
        op("aten::linear", start=12, dur=15),
        kernel("gemm", start=60, dur=20, launched_at=14),
        kernel("relu", start=80, dur=3, launched_at=40),
    )
    assert table(rank) == {"Net_0": (1, 50, 30, 23, 0), "Linear_0": (1, 20, 20, 20, 0)}


def test_backward_device_time_goes_to_the_module_of_the_forward_operator(
    explained: Explain,
) -> None:
    # forward addmm (sequence 7) inside Linear; AddmmBackward0 (7) on the autograd thread runs 33 µs
    rank = explained(
        frame("nn.Module: Net_0", start=0, dur=50),
        frame("nn.Module: Linear_0", start=10, dur=20),
        op("aten::addmm", start=12, dur=15, sequence=7),
        kernel("fwd", start=60, dur=20, launched_at=14),
        op(
            "autograd::engine::evaluate_function: AddmmBackward0",
            start=100,
            dur=30,
            thread=AUTOGRAD,
            sequence=7,
            forward_thread=1,
        ),
        op("AddmmBackward0", start=102, dur=25, thread=AUTOGRAD, sequence=7, forward_thread=1),
        op("aten::mm", start=104, dur=10, thread=AUTOGRAD),
        kernel("bwd", start=140, dur=33, launched_at=105, thread=AUTOGRAD),
    )
    assert table(rank) == {"Net_0": (1, 50, 30, 20, 33), "Linear_0": (1, 20, 20, 20, 33)}


def test_a_module_inside_itself_is_counted_once(explained: Explain) -> None:
    rank = explained(
        frame("nn.Module: Tree_0", start=0, dur=50),
        frame("nn.Module: Tree_0", start=10, dur=30),
        op("aten::mm", start=12, dur=5),
        kernel("k", start=60, dur=9, launched_at=14),
    )
    assert table(rank) == {"Tree_0": (2, 50, 50, 9, 0)}


def test_calls_of_one_module_add_up(explained: Explain) -> None:
    rank = explained(
        frame("nn.Module: Linear_0", start=0, dur=10),
        kernel("k", start=20, dur=9, launched_at=4),
        frame("nn.Module: Linear_0", start=30, dur=12),
        kernel("k", start=50, dur=8, launched_at=34),
    )
    assert table(rank) == {"Linear_0": (2, 22, 22, 17, 0)}


def test_modules_with_most_device_time_come_first(explained: Explain) -> None:
    rank = explained(
        frame("nn.Module: Small_0", start=0, dur=40),
        kernel("k", start=50, dur=5, launched_at=4),
        frame("nn.Module: Large_0", start=40, dur=5),
        kernel("k", start=60, dur=50, launched_at=42),
    )
    assert list(table(rank)) == ["Large_0", "Small_0"]


def test_without_stacks_there_are_no_modules(explained: Explain) -> None:
    assert explained(op("aten::mm", start=0, dur=5), device=None).modules == ()


# Host time by Python function, and which frame is the user's own.


def test_a_function_is_its_file_line_and_name(explained: Explain) -> None:
    # main 0-100 [load 10-30, step 40-90 [aten::mm 50-80 -> kernel 7]]
    rank = explained(
        frame("train.py(12): main", start=0, dur=100),
        frame("/home/me/data.py(7): load", start=10, dur=20),
        frame("train.py(30): step", start=40, dur=50),
        op("aten::mm", start=50, dur=30),
        kernel("k", start=110, dur=7, launched_at=55),
    )
    rows = {
        (line.file, line.line, line.function): (
            line.calls,
            line.host_total_ns,
            line.host_self_ns,
            line.device_ns,
        )
        for line in rank.lines
    }
    assert rows == {
        ("train.py", 12, "main"): (1, 100_000, 30_000, 7_000),
        ("/home/me/data.py", 7, "load"): (1, 20_000, 20_000, 0),
        ("train.py", 30, "step"): (1, 50_000, 20_000, 7_000),
    }


def test_recursive_functions_are_counted_once_in_totals(explained: Explain) -> None:
    rank = explained(
        frame("tree.py(1): walk", start=0, dur=30),
        frame("tree.py(9): child", start=4, dur=24),
        frame("tree.py(1): walk", start=5, dur=20),
        kernel("k", start=40, dur=7, launched_at=12, launch_dur=2),
    )
    walk = next(line for line in rank.lines if line.function == "walk")
    # self: 30 - 24 of the outer, 20 - 2 (the launch call) of the inner
    assert (walk.calls, walk.host_total_ns, walk.host_self_ns) == (2, 30_000, 24_000)
    assert walk.device_ns == 7_000


def test_builtins_and_modules_are_not_lines(explained: Explain) -> None:
    rank = explained(
        frame("<built-in method run_backward of Engine object at 0x7f>", start=0, dur=30),
        frame("nn.Module: Linear_0", start=40, dur=10),
        kernel("k", start=60, dur=7, launched_at=12),
    )
    assert rank.lines == ()


def test_the_longest_own_time_comes_first(explained: Explain) -> None:
    rank = explained(
        frame("a.py(1): outer", start=0, dur=100),
        frame("a.py(2): inner", start=5, dur=90),
        kernel("k", start=110, dur=1, launched_at=101),
    )
    assert [line.function for line in rank.lines] == ["inner", "outer"]


def test_the_users_frame_is_the_nearest_one_outside_libraries(read: Read) -> None:
    trace = read(
        frame("train.py(12): main", start=0, dur=100),
        frame("torch/nn/modules/module.py(1775): _call_impl", start=10, dur=80),
        frame("model.py(5): forward", start=12, dur=70),
        frame("torch/nn/functional.py(99): linear", start=20, dur=50),
        frame("<built-in function linear>", start=21, dur=48),
        op("aten::linear", start=22, dur=40),
    )
    names = [trace.strings[code] for code in trace.host.name.tolist()]
    at = np.array([names.index("aten::linear"), names.index("train.py(12): main"), -1])
    found = user_frames(trace, at).tolist()
    assert [names[row] if row >= 0 else None for row in found] == [
        "model.py(5): forward",
        "train.py(12): main",
        None,
    ]


def test_with_only_library_frames_the_nearest_of_them_is_named(read: Read) -> None:
    trace = read(
        frame("torch/optim/adamw.py(200): step", start=0, dur=100),
        frame("<built-in function _foreach_add_>", start=10, dur=20),
    )
    assert user_frames(trace, np.array([1])).tolist() == [0]


def test_without_stacks_there_is_no_users_frame(read: Read) -> None:
    trace = read(op("aten::mm", start=0, dur=1))
    assert user_frames(trace, np.array([0, -1])).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "name",
    [
        "torch/nn/modules/module.py(1775): _call_impl",
        "/usr/lib/python3.11/threading.py(975): run",
        "/venv/lib/python3.11/site-packages/timm/models/vit.py(10): forward",
        "/usr/lib/python3/dist-packages/yaml/__init__.py(1): load",
        "<frozen runpy>(88): _run_code",
        "<built-in method item of Tensor object at 0x7f>",
        "threading.py(1002): _bootstrap",
        "contextlib.py(79): inner",
        "nn.Module: Linear_0",
    ],
)
def test_frames_of_libraries(name: str) -> None:
    assert is_library(name)


@pytest.mark.parametrize(
    "name",
    [
        "train.py(12): main",
        "/home/me/project/torch_models/net.py(3): forward",
        "random_crop.py(3): crop",
        "src/copying.py(3): copy",
        "C:\\work\\train.py(12): main",
    ],
)
def test_frames_of_users(name: str) -> None:
    assert not is_library(name)


def test_a_path_with_brackets_is_read_to_its_last_line_number() -> None:
    place = place_of("/data (old)/train.py(12): <lambda>")
    assert place is not None
    assert (place.file, place.line, place.function) == ("/data (old)/train.py", 12, "<lambda>")


# Blocking calls: what waited, in which operator, called from where.


def rows(rank: RankExplanation) -> list[tuple[str, str, int, int, str | None, int | None]]:
    return [(s.name, s.operator, s.count, s.total_ns // 1000, s.file, s.line) for s in rank.syncs]


def test_calls_of_one_operator_are_one_row(explained: Explain) -> None:
    rank = explained(
        kernel("k", start=0, dur=1),
        op("aten::item", start=0, dur=20),
        op("aten::_local_scalar_dense", start=1, dur=18),
        call("cudaStreamSynchronize", start=2, dur=10),
        op("aten::_local_scalar_dense", start=30, dur=18),
        call("cudaStreamSynchronize", start=32, dur=7),
        call("cudaDeviceSynchronize", start=60, dur=30),
    )
    assert rows(rank) == [
        ("cudaDeviceSynchronize", "", 1, 30, None, None),
        ("cudaStreamSynchronize", "aten::_local_scalar_dense", 2, 17, None, None),
    ]


def test_each_place_in_the_code_is_a_row_of_its_own(explained: Explain) -> None:
    """The costly place is named even where a cheap one of the same operator came first."""
    rank = explained(
        kernel("k", start=0, dur=1),
        frame("train.py(10): warm_up", start=0, dur=20),
        op("aten::item", start=1, dur=15),
        call("cudaStreamSynchronize", start=2, dur=3),
        frame("train.py(40): log", start=30, dur=60),
        frame("torch/_tensor.py(1): __format__", start=31, dur=58),
        op("aten::item", start=32, dur=55),
        call("cudaStreamSynchronize", start=33, dur=50),
    )
    assert rows(rank) == [
        ("cudaStreamSynchronize", "aten::item", 1, 50, "train.py", 40),
        ("cudaStreamSynchronize", "aten::item", 1, 3, "train.py", 10),
    ]


def test_calls_that_do_not_wait_are_not_listed(explained: Explain) -> None:
    rank = explained(
        kernel("k", start=10, dur=1, launched_at=0),
        call("cudaMemcpyAsync", start=2, dur=3),
        call("cudaEventRecord", start=6, dur=1),
    )
    assert rank.syncs == ()
