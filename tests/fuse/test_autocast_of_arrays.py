"""Under autocast each function of an array gives the precision that it gives a model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepscope.fix.fuse import fuse


class Code(nn.Module):
    """A function of an input, a matrix and a vector of the model's own."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.vector = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.matrix, self.vector)


ROWS, PICTURES, WORDS = (4, 6), (2, 6, 5, 5), (2, 3, 6)
BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 3), ROWS),
    "linear without bias": (lambda: nn.Linear(6, 3, bias=False), ROWS),
    "convolution": (lambda: nn.Conv2d(6, 4, 3), PICTURES),
    "convolution of one": (lambda: nn.Conv2d(6, 4, 1), PICTURES),
    "convolution of one, 1d": (lambda: nn.Conv1d(3, 4, 1), WORDS),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 3), PICTURES),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)), PICTURES),
    "batch norm after product": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU()),
        WORDS,
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), ROWS),
    "rms norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6)), ROWS),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4)), PICTURES),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1)), ROWS),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), ROWS),
    "gelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU()), ROWS),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), WORDS),
    "matmul": (lambda: Code(lambda x, m, v: x @ m + v), ROWS),
    "addmm": (lambda: Code(lambda x, m, v: torch.addmm(v, x, m)), ROWS),
    "joined": (lambda: Code(lambda x, m, _: torch.cat([x, x @ m])), ROWS),
    "mean square": (lambda: Code(lambda x, m, _: functional.mse_loss(x @ m, x)), ROWS),
    "sum": (lambda: Code(lambda x, m, _: (x @ m).sum(-1)), ROWS),
    "norm": (lambda: Code(lambda x, m, _: (x @ m).norm(dim=-1)), ROWS),
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed", "ignore:Mismatch dtype between input")
@pytest.mark.parametrize("shared", [False, True], ids=["own batches", "one batch"])
@pytest.mark.parametrize("name", BUILDS)
def test_precision_and_values_are_those_of_a_model_alone(name: str, shared: bool) -> None:
    build, shape = BUILDS[name]
    torch.manual_seed(0)
    models = [build() for _ in range(2)]
    given: Any = [torch.randn(shape) for _ in models]
    if shared:
        given = [given[0]] * 2
    with torch.autocast("cpu", torch.bfloat16):
        alone = [model(x) for model, x in zip(models, given, strict=True)]
        made = fuse(models)(given[0] if shared else given)
    assert made.dtype == alone[0].dtype
    for place, wanted in enumerate(alone):
        torch.testing.assert_close(made.of(place), wanted, rtol=2e-2, atol=2e-2)
