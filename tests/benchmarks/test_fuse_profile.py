"""Kernels of a profile are named after the operators that launched them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType

from fuse_profile import UNKNOWN, KernelRow, kernel_rows, launchers, profile_calls, table

NODE = "autograd::engine::evaluate_function: ConvolutionBackward0"


def operator(
    name: str, *kernels: tuple[str, float], parent: Any = None, shapes: Any = ()
) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        kernels=[SimpleNamespace(name=one, duration=us) for one, us in kernels],
        cpu_parent=parent,
        input_shapes=shapes,
        device_type=DeviceType.CPU,
    )


def kernel(name: str, us: float, annotation: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA,
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        is_user_annotation=annotation,
    )


def one_step() -> list[SimpleNamespace]:
    node = operator(NODE)
    back = operator("aten::convolution_backward", ("wgrad", 30.0), ("wgrad", 20.0), parent=node,
                    shapes=[[128, 64, 8, 8], [], [64, 3, 7, 7], [1]])  # fmt: skip
    forward = operator("aten::cudnn_convolution", ("fprop", 5.0), parent=operator("aten::conv2d"))
    return [
        node, back, forward, kernel("wgrad", 30.0), kernel("wgrad", 20.0), kernel("fprop", 5.0),
        kernel("adam", 7.0), kernel("step of all models", 70.0, annotation=True),
    ]  # fmt: skip


def test_a_kernel_is_named_by_its_autograd_node_operator_and_shapes() -> None:
    back = "ConvolutionBackward0 > aten::convolution_backward [128,64,8,8] [64,3,7,7]"
    assert kernel_rows(one_step()) == [
        KernelRow("wgrad", back, 2, 50.0),
        KernelRow("adam", UNKNOWN, 1, 7.0),
        KernelRow("fprop", "aten::conv2d > aten::cudnn_convolution", 1, 5.0),
    ]


def test_kernels_of_a_graph_are_named_after_the_step_that_ran_as_it_is() -> None:
    names = launchers(kernel_rows(one_step()))
    assert names.keys() == {"wgrad", "fprop"}
    graph = [operator("cudaGraphLaunch"), kernel("wgrad", 25.0), kernel("new", 1.0)]
    rows = kernel_rows(graph, names)
    assert rows == [
        KernelRow("wgrad", names["wgrad"], 1, 25.0),
        KernelRow("new", UNKNOWN, 1, 1.0),
    ]
    lines = table(rows, 1).splitlines()
    assert lines[1].split()[:5] == ["0.025", "96.2%", "1", "25.0", "ConvolutionBackward0"]
    assert lines[-1] == "   0.026 in all"


def test_a_kernel_of_many_operators_names_those_that_take_longest() -> None:
    rows = [KernelRow("copy", f"op {number}", 1, 9.0 - number) for number in range(5)]
    assert launchers(rows) == {"copy": "op 0; op 1; op 2; 2 more"}


def test_on_a_cpu_operators_stand_for_kernels() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    rows = kernel_rows(profile_calls(lambda: (weight @ weight).sum().backward(), False))
    by = {row.launched_by for row in rows}
    assert any(name.startswith("aten::matmul > aten::mm [4,4]") for name in by)
    assert any(name.startswith("MmBackward0 > ") for name in by)
