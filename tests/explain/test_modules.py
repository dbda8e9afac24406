"""Time by nn.Module: forward as called, backward as linked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .build import AUTOGRAD, frame, kernel, op

if TYPE_CHECKING:
    from stepscope.records.explanation import RankExplanation

    from .conftest import Explain


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
