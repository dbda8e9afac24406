"""Repeated calls go through torch's own bindings only where these end at the same overload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.fix.saved.replay import quickest_call

aten = torch.ops.aten
X = torch.randn(2, 3, 4, 4)
ROW = torch.randn(3)


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (aten.relu.default, (X,), {}),
        (aten.gelu.default, (X,), {"approximate": "tanh"}),
        (aten.native_batch_norm.default, (X, ROW, ROW, None, None, True, 0.1, 1e-5), {}),
        (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
        (aten.cat.default, ([X, X], 1), {}),
        (aten.mul.Tensor, (X, X), {}),
        (aten.mean.dim, (X, [2, 3]), {}),
    ],
)
def test_a_binding_that_ends_at_the_same_overload_is_taken(
    operator: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    with torch.no_grad():
        function, result = quickest_call(operator, args, kwargs)
        again, expected = function(*args, **kwargs), operator(*args, **kwargs)
    assert function is not operator._op
    pairs = zip(_listed(result), _listed(again), _listed(expected), strict=True)
    assert all(torch.equal(one, two) and torch.equal(two, three) for one, two, three in pairs)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.add.Scalar, (X, 2)),  # torch.add ends at add.Tensor
        (aten.relu_.default, (X.clone(),)),  # changes its argument: tried only once
    ],
)
def test_otherwise_the_overload_itself_is_called(operator: Any, args: Any) -> None:
    expected = operator(*(one.clone() if isinstance(one, torch.Tensor) else one for one in args))
    with torch.no_grad():
        function, result = quickest_call(operator, args, {})
    assert function is operator._op
    assert torch.equal(result, expected)


def _listed(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
