"""Flame trees lose no time: children add up to parents, roots to the whole."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.ui.html.flame import keep_widest
from stepscope.ui.html.picture import UNLINKED, draw_rank


@pytest.fixture
def trace(make_trace):
    return make_trace(steps=4, layers=6)


@pytest.fixture
def picture(trace, explain):
    return draw_rank(trace, explain(trace))


def path(picture, flame, node):
    names = []
    while node >= 0:
        names.append(picture.strings[flame.name[node]])
        node = int(flame.parent[node])
    return names[::-1]


def roots(flame):
    return flame.total_ns[flame.parent < 0].sum()


def test_host_roots_add_up_to_the_outermost_events(trace, picture):
    assert roots(picture.host_flame) == trace.host.dur_ns[trace.host.parent < 0].sum()
    assert picture.host_flame.self_ns.sum() == roots(picture.host_flame)


def test_device_roots_add_up_to_all_device_work(trace, picture):
    assert roots(picture.device_flame) == trace.device.dur_ns.sum()
    assert picture.device_flame.self_ns.sum() == roots(picture.device_flame)


def test_a_parent_comes_first_and_is_at_least_as_wide(picture):
    for flame in (picture.host_flame, picture.device_flame):
        child = np.flatnonzero(flame.parent >= 0)
        assert (flame.parent[child] < child).all()
        below = np.bincount(flame.parent[child], flame.total_ns[child], len(flame))
        assert (below <= flame.total_ns).all()


def test_host_stacks_match_a_plain_count(trace, picture):
    def stack(row):
        names = []
        while row >= 0:
            name = trace.strings[trace.host.name[row]]
            names.append("ProfilerStep#*" if name.startswith("ProfilerStep#") else name)
            row = int(trace.host.parent[row])
        return tuple(names[::-1])

    expected: dict[tuple[str, ...], int] = {}
    for row in range(len(trace.host)):
        expected[stack(row)] = expected.get(stack(row), 0) + int(trace.host.dur_ns[row])
    flame = picture.host_flame
    inner = np.flatnonzero(flame.parent >= 0).tolist()
    seen = {tuple(path(picture, flame, n)[1:]): int(flame.total_ns[n]) for n in inner}
    assert seen == expected


def test_kernels_hang_under_the_operator_that_launched_them(picture):
    flame = picture.device_flame
    leaves = [n for n in range(len(flame)) if "gemm_0" in picture.strings[flame.name[n]]]
    assert path(picture, flame, leaves[0]) == [
        "Main · python",
        "ProfilerStep#*",
        "/home/me/train.py(42): forward",
        "nn.Module: Block_0",
        "aten::linear",
        "aten::addmm",
        "void at::native::gemm_0<float, 128>()",
    ]


def test_work_with_no_recorded_launch_is_kept_apart(trace, explain):
    lost = trace.device.launch.copy()
    lost[:5] = -1
    trace = replace(trace, device=replace(trace.device, launch=lost))
    picture = draw_rank(trace, explain(trace))
    flame = picture.device_flame
    node = [picture.strings[c] for c in flame.name.tolist()].index(UNLINKED)
    assert flame.total_ns[node] == trace.device.dur_ns[:5].sum()
    assert roots(flame) == trace.device.dur_ns.sum()


def test_the_narrowest_nodes_go_first_and_are_counted(picture):
    whole = picture.host_flame
    small = keep_widest(whole, max_nodes=12)
    assert len(small) == 12
    assert small.left_out == len(whole) - 12
    assert roots(small) == roots(whole)
    assert small.total_ns.min() >= np.sort(whole.total_ns)[::-1][12]
    child = np.flatnonzero(small.parent >= 0)
    assert (small.parent[child] < child).all()
