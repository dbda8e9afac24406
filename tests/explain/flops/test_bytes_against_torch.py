"""Bytes read from a trace, against the tensors that really went in and came out.

The trace has no outputs: their sizes are derived. Here every operator runs for real, and what it
was given and what it gave back are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn import functional

from .recording import record, torch


def floats(*shape: int, dtype: Any = None) -> Any:
    return torch.rand(*shape, dtype=dtype) + 0.5


def size(*tensors: Any) -> int:
    """Bytes of tensors, and of lists of them."""
    total = 0
    for each in tensors:
        if isinstance(each, torch.Tensor):
            total += each.numel() * each.element_size()
        elif isinstance(each, (list, tuple)):
            total += size(*each)
    return total


A, B, ROW = floats(4, 6), floats(4, 6), floats(6)
HALF, INDEX = floats(4, 6, dtype=torch.bfloat16), torch.tensor([0, 2, 2])
IMAGE, WEIGHT = floats(2, 3, 8, 8), floats(5, 3, 3, 3)

# Operator -> (call, arguments). Inputs are the arguments that are tensors, outputs what it returns.
WHOLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "aten::add": (torch.add, (A, ROW)),
    "aten::mul": (torch.mul, (A, HALF)),
    "aten::div": (torch.div, (A, B)),
    "aten::gelu": (functional.gelu, (HALF,)),
    "aten::exp": (torch.exp, (A,)),
    "aten::gt": (torch.gt, (A, B)),
    "aten::where": (torch.where, (A > 1, A, ROW)),
    "aten::addcmul": (torch.addcmul, (A, B, ROW)),
    "aten::masked_fill": (torch.masked_fill, (A, A > 1, 0.0)),
    "aten::clone": (torch.clone, (A,)),
    "aten::sum": (lambda x: x.sum(0), (A,)),
    "aten::mean": (lambda x: x.mean((0, 1), keepdim=True), (A,)),
    "aten::amax": (lambda x: x.amax(-1), (A,)),
    "aten::argmax": (lambda x: x.argmax(1), (A,)),
    "aten::max": (lambda x: x.max(1), (A,)),
    "aten::linalg_vector_norm": (lambda x: torch.linalg.vector_norm(x, 2, 1), (A,)),
    "aten::_softmax": (lambda x: x.softmax(-1), (A,)),
    "aten::_log_softmax": (lambda x: x.log_softmax(-1), (A,)),
    "aten::native_layer_norm": (
        lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5),
        (A, ROW, ROW),
    ),
    "aten::native_dropout": (lambda x: torch.native_dropout(x, 0.5, True), (A,)),
    "aten::mm": (torch.mm, (A, B.t())),
    "aten::addmm": (torch.addmm, (ROW[:4], A, B.t())),
    "aten::bmm": (torch.bmm, (IMAGE[0], IMAGE[1])),
    "aten::convolution": (
        lambda x, w: functional.conv2d(x, w, stride=2, padding=1),
        (IMAGE, WEIGHT),
    ),
    "aten::max_pool2d_with_indices": (
        lambda x: functional.max_pool2d(x, 3, 2, 1, return_indices=True, ceil_mode=True),
        (IMAGE,),
    ),
    "aten::avg_pool2d": (lambda x: functional.avg_pool2d(x, 2), (IMAGE,)),
    "aten::_adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, (3, 2)), (IMAGE,)),
    "aten::upsample_nearest2d": (
        lambda x: functional.interpolate(x, size=(12, 10), mode="nearest"),
        (IMAGE,),
    ),
    "aten::upsample_bilinear2d_backward": (
        lambda x: torch.ops.aten.upsample_bilinear2d_backward(x, [8, 8], [2, 3, 4, 4], False),
        (IMAGE,),
    ),
    "aten::glu": (lambda x: functional.glu(x, 1), (A,)),
    "aten::cumsum": (lambda x: x.cumsum(0), (A,)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_bytes_are_those_of_inputs_and_outputs(name: str, tmp_path: Path) -> None:
    run, given = WHOLE[name]
    out = run(*given)
    trace, costs = record(tmp_path / "trace.json", lambda: run(*given))
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == name]
    assert rows, f"{name} did not run"
    assert costs.bytes_moved[rows[0]] == size(given) + size(out)


# What is not all inputs and all outputs: rows that are looked up, targets that are written only.
PART: dict[str, tuple[Callable[[], Any], int]] = {
    "aten::copy_": (lambda: torch.empty(4, 6).copy_(HALF), 24 * 4 + 24 * 2),
    "aten::_to_copy": (lambda: A.to(torch.bfloat16), 24 * 4 + 24 * 2),
    "aten::zero_": (lambda: torch.empty(4, 6).zero_(), 24 * 4),
    "aten::add_": (lambda: A.clone().add_(ROW), 24 * 4 + 6 * 4 + 24 * 4),
    "aten::embedding": (lambda: functional.embedding(INDEX, A), 3 * 8 + 2 * 3 * 6 * 4),
    "aten::index_select": (lambda: A.index_select(1, INDEX), 3 * 8 + 2 * 4 * 3 * 4),
    "aten::gather": (lambda: A.gather(0, INDEX[:, None]), 3 * 8 + 2 * 3 * 4),
    "aten::scatter_add_": (
        lambda: A.clone().scatter_add_(0, INDEX[:, None], torch.ones(3, 1)),
        3 * 8 + 3 * 3 * 4,
    ),
    "aten::nll_loss_forward": (lambda: functional.nll_loss(A, INDEX.repeat(2)[:4]), 4 * 8 + 4 * 4),
    "aten::view": (lambda: A.view(6, 4), 0),
    "aten::mse_loss": (lambda: functional.mse_loss(A, B, reduction="none"), 3 * 24 * 4),
}


@pytest.mark.parametrize("name", PART)
def test_bytes_are_those_that_the_operator_touches(name: str, tmp_path: Path) -> None:
    run, expected = PART[name]
    trace, costs = record(tmp_path / "trace.json", run)
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == name]
    assert rows, f"{name} did not run"
    assert costs.bytes_moved[rows[0]] == expected


def test_an_output_that_was_passed_in_is_written_and_not_read(tmp_path: Path) -> None:
    out = torch.empty(4, 6)
    trace, costs = record(tmp_path / "trace.json", lambda: torch.mul(A, B, out=out))
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == "aten::mul"]
    assert costs.bytes_moved[rows].tolist() == [3 * 24 * 4]


def test_a_list_takes_the_dtype_of_what_is_around_it(tmp_path: Path) -> None:
    """cat is given no dtype: the node of autograd around it is."""
    parts = torch.rand(3, 4, dtype=torch.double, requires_grad=True)
    trace, costs = record(
        tmp_path / "trace.json", lambda: torch.stack(torch.unbind(parts, 0)).sum().backward()
    )
    cats = np.array([trace.strings[code] == "aten::cat" for code in trace.host.name])
    moved = dict(zip(costs.phase[cats].tolist(), costs.bytes_moved[cats].tolist(), strict=True))
    assert moved == {0: -1, 1: 2 * 12 * 8}  # forward: nobody says; backward: double


def test_fused_optimizers_read_and_write_parameters_and_state(tmp_path: Path) -> None:
    weights = [torch.rand(5, 3, requires_grad=True), torch.rand(7, requires_grad=True)]
    optimizer = torch.optim.AdamW(weights, fused=True)

    def train() -> None:
        optimizer.zero_grad()
        sum(each.sum() for each in weights).backward()
        optimizer.step()

    train()
    trace, costs = record(tmp_path / "trace.json", train)
    name = "aten::_fused_adamw_"
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == name]
    # 22 elements: parameter, gradient, two moments read; all but the gradient written.
    assert costs.bytes_moved[rows].tolist() == [22 * 7 * 4]
    assert costs.phase[rows].tolist() == [2]


def test_an_operator_that_no_table_has_is_unknown(tmp_path: Path) -> None:
    trace, costs = record(tmp_path / "trace.json", lambda: torch.sort(A))
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == "aten::sort"]
    assert costs.bytes_moved[rows].tolist() == [-1] * len(rows)
    assert costs.flops[rows].tolist() == [0] * len(rows)
