"""Host and device time by operator and input shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .build import call, frame, graph, kernel, op

if TYPE_CHECKING:
    from stepscope.records.explanation import Operator, RankExplanation

    from .conftest import Explain


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
