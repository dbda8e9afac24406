"""Every operator: fused models train as each would alone, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import assert_same, train_both

Inputs = Callable[[], tuple[Any, ...]]


def pictures(channels: int = 4, side: int = 8, ndim: int = 2) -> Inputs:
    return lambda: (torch.randn(5, channels, *(side,) * ndim),)


def rows() -> Inputs:
    return lambda: (torch.randn(5, 6),)


def words() -> Inputs:
    return lambda: (torch.randint(11, (5, 7)),)


def sequences() -> Inputs:
    return lambda: (torch.randn(5, 7, 8),)


class Code(nn.Module):
    """A module whose forward is the given function of its parts and its input."""

    def __init__(self, forward: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.code, self.parts = forward, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(*self.parts, x)


def code(forward: Callable[..., Any], *parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Code(forward, *(make() for make in parts))


def after(first: Callable[[], nn.Module], *rest: Callable[[], nn.Module]) -> Any:
    return lambda: nn.Sequential(first(), *(make() for make in rest))


def convolution() -> nn.Module:
    return nn.Conv2d(4, 6, 3)


def attention(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **settings)


def linear(width: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, outputs)


ACTIVATIONS = [
    "ReLU", "ReLU6", "GELU", "SiLU", "Mish", "ELU", "SELU", "CELU", "LeakyReLU", "Hardtanh",
    "Hardswish", "Hardsigmoid", "Softplus", "Softsign", "Tanh", "Sigmoid", "LogSigmoid",
    "Tanhshrink", "Softshrink", "PReLU", "GLU",
]  # fmt: skip

Nets = dict[str, Callable[[], nn.Module]]
OF_SIGNALS: Nets = {
    "conv1d": lambda: nn.Conv1d(4, 6, 3, stride=2),
    "transposed1d": lambda: nn.ConvTranspose1d(4, 6, 3, stride=2),
    "dropout1d": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.Dropout1d(0.4)),
    "pool1d": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(2)),
}
OF_VOLUMES: Nets = {
    "conv3d": lambda: nn.Conv3d(2, 4, 3),
    "batchnorm3d": lambda: nn.BatchNorm3d(2),
    "pool3d": lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.MaxPool3d(2)),
}
OF_PICTURES: Nets = {
    "conv2d-groups": lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False),
    "conv2d-same": lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2),
    "conv2d-reflect": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "transposed2d": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
    "batchnorm2d": after(convolution, lambda: nn.BatchNorm2d(6)),
    "batchnorm-average": lambda: nn.BatchNorm2d(4, momentum=None),
    "groupnorm": after(convolution, lambda: nn.GroupNorm(3, 6)),
    "instancenorm": lambda: nn.InstanceNorm2d(4, affine=True),
    "instancenorm-tracked": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "dropout2d": after(convolution, lambda: nn.Dropout2d(0.4)),
    "max-pool": after(convolution, lambda: nn.MaxPool2d(2, stride=1, padding=1), nn.Flatten),
    "avg-pool": after(convolution, lambda: nn.AvgPool2d(3, 2, ceil_mode=True), nn.Flatten),
    "lp-pool": after(convolution, lambda: nn.LPPool2d(2, 2), nn.Flatten),
    "adaptive-max": after(convolution, lambda: nn.AdaptiveMaxPool2d((2, 3)), nn.Flatten),
    "adaptive-avg": after(convolution, lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten),
    "pixel-shuffle": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)),
    "upsample": after(convolution, lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "residual": code(
        lambda a, b, x: functional.relu(b(a(x)) + x, inplace=True).mean((2, 3)),
        lambda: nn.Conv2d(4, 4, 3, padding=1),
        lambda: nn.BatchNorm2d(4),
    ),
    "squeeze-excite": code(
        lambda a, e, x: a(x) * torch.sigmoid(e(a(x).mean((2, 3), keepdim=True))),
        convolution,
        lambda: nn.Conv2d(6, 6, 1),
    ),
}
OF_ROWS: Nets = {
    "bilinear": code(lambda b, x: b(x, x * 2), lambda: nn.Bilinear(6, 6, 3)),
    "batchnorm1d": after(linear(6, 4), lambda: nn.BatchNorm1d(4)),
    "dropout": after(linear(6, 8), lambda: nn.Dropout(0.4)),
    "lstm-cell": code(lambda c, x: c(x)[0], lambda: nn.LSTMCell(6, 4)),
    "gather": code(lambda p, x: p(x).gather(1, p(x).argmax(1, keepdim=True)), linear(6, 4)),
    "take along": code(
        lambda p, x: p(x).take_along_dim(p(x).argmax(1, keepdim=True), dim=1), linear(6, 4)
    ),
}
OF_WORDS: Nets = {
    "embedding": lambda: nn.Embedding(11, 6),
    "embedding-padding": lambda: nn.Embedding(11, 6, padding_idx=3),
    "embedding-bag": lambda: nn.EmbeddingBag(11, 6, mode="mean"),
}
OF_SEQUENCES: Nets = {
    "linear-3d": linear(8, 3),
    "layernorm": after(linear(8, 6), lambda: nn.LayerNorm(6)),
    "layernorm-2d": lambda: nn.LayerNorm((7, 8)),
    "rmsnorm": lambda: nn.RMSNorm(8),
    "attention": code(lambda a, x: a(x, x, x)[0], attention()),
    "attention-masked": code(
        lambda a, x: a(*(x, x, x), need_weights=False, attn_mask=torch.ones(7, 7).triu(1).bool())[
            0
        ],
        attention(),
    ),
    "attention-padded": code(
        lambda a, x: a(x, x, x, key_padding_mask=torch.eye(5, 7).bool())[0], attention()
    ),
    "attention-apart": code(
        lambda a, x: a(x, x[..., :4], x[..., 4:])[0], attention(kdim=4, vdim=4)
    ),
    "encoder-layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True),
        2,
        enable_nested_tensor=False,
    ),
    "decoder-layer": code(
        lambda d, x: d(x, x * 0.5),
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ),
    "sdpa": code(
        lambda p, x: functional.scaled_dot_product_attention(
            *p(x).reshape(5, 7, 3, 2, 4).permute(2, 0, 3, 1, 4), is_causal=True
        ),
        linear(8, 24),
    ),
    "lstm": lambda: nn.LSTM(8, 5, 2, batch_first=True),
    "gru": lambda: nn.GRU(8, 5, bidirectional=True),
    "rnn": lambda: nn.RNN(8, 5, nonlinearity="relu"),
    "einsum": code(lambda p, x: torch.einsum("nld,nkd->nlk", p(x), x), linear(8, 8)),
    "indexing": code(
        lambda p, x: torch.cat([p(x)[:, 0], p(x)[:, -1, ...], p(x)[:, 1:3].sum(1)], -1),
        linear(8, 4),
    ),
}
NETS = {
    name: (build, inputs)
    for inputs, nets in (
        (pictures(ndim=1), OF_SIGNALS),
        (pictures(2, 5, 3), OF_VOLUMES),
        (pictures(), OF_PICTURES),
        (rows(), OF_ROWS),
        (words(), OF_WORDS),
        (sequences(), OF_SEQUENCES),
    )
    for name, build in nets.items()
}


@pytest.mark.few(20)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_operator(name: str, shared: bool) -> None:
    build, inputs = NETS[name]
    assert_same(train_both(build, inputs, shared=shared))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    kind = getattr(nn, name)
    build = after(convolution, kind, nn.Flatten, linear(216, 3))
    if name == "GLU":  # halves its channels
        build = after(convolution, lambda: kind(1))
    assert_same(train_both(build, pictures()))


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "cross-entropy": lambda x: functional.cross_entropy(x, torch.arange(5) % 4),
    "smoothed": lambda x: functional.cross_entropy(x, torch.arange(5) % 4, label_smoothing=0.1),
    "ignored": lambda x: functional.cross_entropy(
        x, torch.tensor([0, 1, -100, 2, 3]), ignore_index=-100
    ),
    "weighted": lambda x: functional.cross_entropy(
        x, torch.arange(5) % 4, weight=torch.tensor([1.0, 2.0, 0.5, 1.0])
    ),
    "shares": lambda x: functional.cross_entropy(x, torch.ones(5, 4) / 4),
    "nll": lambda x: functional.nll_loss(functional.log_softmax(x, -1), torch.arange(5) % 4),
    "l1": lambda x: functional.l1_loss(x, torch.zeros(5, 4)),
    "smooth-l1": lambda x: functional.smooth_l1_loss(x, torch.zeros(5, 4)),
    "bce": lambda x: functional.binary_cross_entropy_with_logits(x, torch.eye(5, 4)),
    "kl": lambda x: functional.kl_div(
        functional.log_softmax(x, -1), torch.full((5, 4), 0.25), reduction="batchmean"
    ),
    "sum": lambda x: functional.mse_loss(x, torch.zeros(5, 4), reduction="sum"),
    "by-hand": lambda x: (x - x.mean()).pow(2).mean() + x.std() + x.abs().max(),
    "margin": lambda x: functional.multi_margin_loss(x, torch.arange(5) % 4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    assert_same(train_both(lambda: nn.Linear(6, 4), rows(), loss=LOSSES[name]))


def test_tied_weights_are_stacked_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.out = nn.Linear(8, 11, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.out(self.words(ids))
            return logits

    trained = train_both(Tied, words())
    assert_same(trained)
    assert len(list(trained.array.parameters())) == 1
