"""Every operator: fused models train as each would alone, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import assert_same, train_both


def pictures(channels: int = 4, side: int = 8, ndim: int = 2) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(5, channels, *(side,) * ndim),)


def rows(width: int = 6) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(5, width),)


def words(length: int = 7) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(11, (5, length)),)


def sequences(length: int = 7, width: int = 8) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(5, length, width),)


class Code(nn.Module):
    """A module whose forward is the given function of itself and its input."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.code = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.code(self, *inputs)


def activation(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(4, 6, 3), kind(), nn.Flatten(), nn.Linear(216, 3))


def pooled(pool: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(4, 6, 3), pool(), nn.Flatten())


ACTIVATIONS = [
    "ReLU", "ReLU6", "GELU", "SiLU", "Mish", "ELU", "SELU", "CELU", "LeakyReLU", "Hardtanh",
    "Hardswish", "Hardsigmoid", "Softplus", "Softsign", "Tanh", "Sigmoid", "LogSigmoid",
    "Tanhshrink", "Softshrink", "PReLU", "GLU",
]  # fmt: skip

NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), pictures(ndim=1)),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False), pictures()),
    "conv2d-same": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), pictures()),
    "conv2d-reflect": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        pictures(),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3), pictures(2, 5, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), pictures(ndim=1)),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
        pictures(),
    ),
    "linear-3d": (lambda: nn.Linear(8, 3), sequences()),
    "bilinear": (
        lambda: Code(lambda m, x: m.b(x, x * 2), b=nn.Bilinear(6, 6, 3)),
        rows(),
    ),
    "batchnorm1d": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), rows()),
    "batchnorm2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), pictures()),
    "batchnorm-average": (lambda: nn.BatchNorm2d(4, momentum=None), pictures()),
    "batchnorm3d": (lambda: nn.BatchNorm3d(2), pictures(2, 5, 3)),
    "layernorm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), sequences()),
    "layernorm-2d": (lambda: nn.LayerNorm((7, 8)), sequences()),
    "rmsnorm": (lambda: nn.RMSNorm(8), sequences()),
    "groupnorm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6)), pictures()),
    "instancenorm": (lambda: nn.InstanceNorm2d(4, affine=True), pictures()),
    "instancenorm-tracked": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        pictures(),
    ),
    "embedding": (lambda: nn.Embedding(11, 6), words()),
    "embedding-padding": (lambda: nn.Embedding(11, 6, padding_idx=3), words()),
    "embedding-bag": (lambda: nn.EmbeddingBag(11, 6, mode="mean"), words()),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4)), rows()),
    "dropout1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.Dropout1d(0.4)),
        pictures(ndim=1),
    ),
    "dropout2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Dropout2d(0.4)), pictures()),
    "max-pool": (pooled(lambda: nn.MaxPool2d(2, stride=1, padding=1)), pictures()),
    "avg-pool": (pooled(lambda: nn.AvgPool2d(3, 2, ceil_mode=True)), pictures()),
    "lp-pool": (pooled(lambda: nn.LPPool2d(2, 2)), pictures()),
    "adaptive-max": (pooled(lambda: nn.AdaptiveMaxPool2d((2, 3))), pictures()),
    "adaptive-avg": (pooled(lambda: nn.AdaptiveAvgPool2d(1)), pictures()),
    "pool1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(2)),
        pictures(ndim=1),
    ),
    "pool3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.MaxPool3d(2)), pictures(2, 5, 3)),
    "pixel-shuffle": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)), pictures()),
    "upsample": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        pictures(),
    ),
    "attention": (
        lambda: Code(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        sequences(),
    ),
    "attention-masked": (
        lambda: Code(
            lambda m, x: m.a(
                *(x, x, x),
                need_weights=False,
                attn_mask=torch.ones(7, 7).triu(1).bool(),
            )[0],
            a=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        sequences(),
    ),
    "attention-padded": (
        lambda: Code(
            lambda m, x: m.a(x, x, x, key_padding_mask=torch.eye(5, 7).bool())[0],
            a=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        sequences(),
    ),
    "attention-apart": (
        lambda: Code(
            lambda m, x: m.a(x, x[..., :4], x[..., 4:])[0],
            a=nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=4),
        ),
        sequences(),
    ),
    "encoder-layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        sequences(),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True),
            2,
            enable_nested_tensor=False,
        ),
        sequences(),
    ),
    "decoder-layer": (
        lambda: Code(
            lambda m, x: m.d(x, x * 0.5),
            d=nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        ),
        sequences(),
    ),
    "sdpa": (
        lambda: Code(
            lambda m, x: functional.scaled_dot_product_attention(
                *m.p(x).reshape(5, 7, 3, 2, 4).permute(2, 0, 3, 1, 4), is_causal=True
            ),
            p=nn.Linear(8, 24),
        ),
        sequences(),
    ),
    "lstm": (lambda: nn.LSTM(8, 5, 2, batch_first=True), sequences()),
    "gru": (lambda: nn.GRU(8, 5, bidirectional=True), sequences()),
    "rnn": (lambda: nn.RNN(8, 5, nonlinearity="relu"), sequences()),
    "lstm-cell": (lambda: Code(lambda m, x: m.c(x)[0], c=nn.LSTMCell(6, 4)), rows()),
    "residual": (
        lambda: Code(
            lambda m, x: functional.relu(m.b(m.a(x)) + x, inplace=True).mean((2, 3)),
            a=nn.Conv2d(4, 4, 3, padding=1),
            b=nn.BatchNorm2d(4),
        ),
        pictures(),
    ),
    "squeeze-excite": (
        lambda: Code(
            lambda m, x: m.a(x) * torch.sigmoid(m.e(m.a(x).mean((2, 3), keepdim=True))),
            a=nn.Conv2d(4, 6, 3),
            e=nn.Conv2d(6, 6, 1),
        ),
        pictures(),
    ),
    "einsum": (
        lambda: Code(lambda m, x: torch.einsum("nld,nkd->nlk", m.p(x), x), p=nn.Linear(8, 8)),
        sequences(),
    ),
    "indexing": (
        lambda: Code(
            lambda m, x: torch.cat([m.p(x)[:, 0], m.p(x)[:, -1, ...], m.p(x)[:, 1:3].sum(1)], -1),
            p=nn.Linear(8, 4),
        ),
        sequences(),
    ),
    "gather": (
        lambda: Code(
            lambda m, x: m.p(x).gather(1, m.p(x).argmax(1, keepdim=True)), p=nn.Linear(6, 4)
        ),
        rows(),
    ),
    "take along": (
        lambda: Code(
            lambda m, x: m.p(x).take_along_dim(m.p(x).argmax(1, keepdim=True), dim=1),
            p=nn.Linear(6, 4),
        ),
        rows(),
    ),
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
    make = (lambda: kind(1)) if name == "GLU" else kind
    build = activation(make)
    if name == "GLU":
        build = lambda: nn.Sequential(nn.Conv2d(4, 6, 3), kind(1))  # noqa: E731
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
