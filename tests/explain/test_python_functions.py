"""Host time by Python function, and which frame is the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from stepscope.explain.host_calls import is_library, place_of, user_frames

from .build import frame, kernel, op

if TYPE_CHECKING:
    from .conftest import Explain, Read


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


def test_recursion_is_counted_once_in_totals(explained: Explain) -> None:
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
