"""The seven trainings of the fuse table: HFTA's, as far as the suite has them (MLSys'21, table 2).

A training is written once. Its nets may be one model's (`AloneNet`), an array's (`FusedNet`) or a
vmapped stack's (`VmapNet`): all of them compute, go back and step in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, TrainingPlace
from stepscope.bench.workloads import (
    gans,
    graphs_and_points,
    lean_image_classifiers,
    sequence_models,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Batch = tuple[Any, ...]


class TrainableNet(Protocol):
    """A net, or many of them: a loss is a function of what they give."""

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any: ...
    def __call__(self, *inputs: Any) -> Any: ...
    def zero_grad(self) -> None: ...
    def backward(self, loss: Any) -> None: ...
    def step(self) -> None: ...
    def learn(self, wanted: bool) -> None: ...


@dataclass(frozen=True)
class FuseCase:
    """One training. `build` gives the nets of one model, `step` trains them all once."""

    name: str
    build: Callable[[Config], tuple[nn.Module, ...]]
    optimize: Callable[[nn.Module, float], torch.optim.Optimizer]  # `factor` scales the rate
    batch: Callable[[Config, TrainingPlace], Batch]
    step: Callable[[Sequence[TrainableNet], Batch], Any]
    full: Config
    tiny: Config
    draws: bool  # whether the models drop at random

    def config(self, tiny: bool) -> Config:
        return self.tiny if tiny else self.full


def _one_loss(loss: Callable[..., torch.Tensor]) -> Callable[[Sequence[TrainableNet], Batch], Any]:
    """A step of one net whose loss is `loss(net, *batch)`."""

    def step(nets: Sequence[TrainableNet], batch: Batch) -> Any:
        (net,) = nets
        value = net.compute(lambda *values: loss(net, *values), *batch)
        net.zero_grad()
        net.backward(value)
        net.step()
        return value

    return step


def _adam(**settings: Any) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    def build(net: nn.Module, factor: float) -> torch.optim.Optimizer:
        known: dict[str, Any] = {"lr": 1e-3, **settings}
        device = next(net.parameters()).device
        return torch.optim.Adam(
            net.parameters(), **{**known, "lr": known["lr"] * factor}, fused=device.type == "cuda"
        )

    return build


# ResNet-18: He et al., 2016. Its first layers quarter the picture; the variant for CIFAR keeps it.


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            across = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.short = nn.Sequential(across, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.short(x))


class ResNet18(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        stem = (7, 2, 3) if config.halves else (3, 1, 1)
        layers: list[nn.Module] = [nn.Conv2d(3, width, *stem, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        if config.halves:
            layers.append(nn.MaxPool2d(3, 2, 1))
        inputs = width
        for place in range(4):
            outputs = width << place
            layers += [
                _BasicBlock(inputs, outputs, 1 + (place > 0)),
                _BasicBlock(outputs, outputs, 1),
            ]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.features(x).mean((2, 3)))
        return scores


def _pictures(config: Config, place: TrainingPlace) -> Batch:
    draw, device = place.generator(), place.device
    shape = (config.batch, 3, config.image, config.image)
    labels = torch.randint(config.classes, (config.batch,), generator=draw, device=device)
    return torch.randn(shape, generator=draw, device=device), labels


def _classified(net: TrainableNet, pictures: Any, labels: Any) -> torch.Tensor:
    return functional.cross_entropy(net(pictures).float(), labels)


# A language model of two Transformer layers, as in HFTA: WikiText-2, 35 words.


class TransformerLM(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.words = nn.Embedding(config.words, width)
        self.places = nn.Embedding(config.length, width)
        layers = (
            nn.TransformerEncoderLayer(
                width, config.heads, width, config.dropout, batch_first=True, norm_first=True
            )
            for _ in range(config.layers)
        )
        self.layers = nn.ModuleList(layers)
        self.out = nn.Linear(width, config.words)
        mask = torch.full((config.length, config.length), -torch.inf).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        scores: torch.Tensor = self.out(x)
        return scores


def _texts(config: Config, place: TrainingPlace) -> Batch:
    draw, shape = place.generator(), (config.batch, config.length)
    ids, nexts = (
        torch.randint(config.words, shape, generator=draw, device=place.device) for _ in range(2)
    )
    return ids, nexts


def _next_words(net: TrainableNet, ids: Any, nexts: Any) -> torch.Tensor:
    return functional.cross_entropy(net(ids).flatten(0, 1).float(), nexts.flatten())


# Those of the suite.


def _clouds(config: Config, place: TrainingPlace) -> Batch:
    return graphs_and_points.make_clouds(config, place)[0]


def _cloud_kinds(net: TrainableNet, points: Any, kinds: Any) -> torch.Tensor:
    logits, pose = net(points)
    crooked = graphs_and_points.not_orthogonal(pose)
    return functional.cross_entropy(logits.float(), kinds) + 0.001 * crooked


def _cloud_parts(config: Config, place: TrainingPlace) -> Batch:
    points, kind = graphs_and_points.make_clouds(config, place)[0]
    return points, graphs_and_points.part_of_each_point(points, kind)


def _masked_pairs(config: Config, place: TrainingPlace) -> Batch:
    return tuple(sequence_models.make_batch(config, place.generator()))


def _masked_words(net: TrainableNet, *batch: Any) -> torch.Tensor:
    ids, sentences, masked_at, masked_words, follows = batch
    words, second = net(ids, sentences, masked_at)
    return functional.cross_entropy(
        words.flatten(0, 1).float(), masked_words.flatten()
    ) + functional.cross_entropy(second.float(), follows)


def _discs(config: Config, place: TrainingPlace) -> Batch:
    noise = torch.randn(
        (config.batch, config.noise), generator=place.generator(), device=place.device
    )
    return gans.make_discs(config, place)[0], noise


def _play(nets: Sequence[TrainableNet], batch: Batch) -> Any:
    """The discriminator learns from real and generated pictures, then the generator from it."""
    generator, discriminator = nets
    real, noise = batch

    def judge(pictures: Any, label: float) -> torch.Tensor:
        scores = discriminator(pictures).float()
        wanted = torch.full_like(scores, label)
        return functional.binary_cross_entropy_with_logits(scores, wanted)

    fake = generator.compute(generator, noise)
    for net in nets:
        net.zero_grad()
    discriminator.backward(discriminator.compute(lambda x: judge(x, 1.0), real))
    discriminator.backward(discriminator.compute(lambda x: judge(x.detach(), 0.0), fake))
    discriminator.step()
    discriminator.learn(False)  # it only passes gradients on
    loss = discriminator.compute(lambda x: judge(x, 1.0), fake)
    generator.backward(loss)
    discriminator.learn(True)
    generator.step()
    return loss


def _case(
    name: str,
    build: Callable[[Config], tuple[nn.Module, ...]],
    batch: Callable[[Config, TrainingPlace], Batch],
    step: Callable[[Sequence[TrainableNet], Batch], Any],
    full: Any,
    tiny: Any,
    draws: bool = False,
    optimize: Callable[[nn.Module, float], torch.optim.Optimizer] | None = None,
) -> FuseCase:
    configs = (Config(full), Config({**full, **tiny}))
    return FuseCase(name, build, optimize or _adam(), batch, step, *configs, draws)


def _rmsprop(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(
        net.parameters(), lr=1e-4 * factor, alpha=0.9, momentum=0.9, weight_decay=1e-5
    )


_RESNET = {"batch": 128, "image": 32, "width": 64, "classes": 10, "halves": True}
_LM = {"batch": 20, "length": 35, "words": 33278, "width": 200, "heads": 2, "layers": 2}
_BERT = {**sequence_models.BERT_MEDIUM, "batch": 32, "batches": 1}
_POINTS = {**graphs_and_points.MODELNET40, "batches": 1}
_PARTS = {**graphs_and_points.SHAPENET_PARTS, "batches": 1}
_GAN = {**gans.DCGAN, "batch": 64, "width": 64, "batches": 1}
_MOBILE = {"batch": 128, "image": 32, "width": 1.0, "classes": 10}
CASES = {
    case.name: case
    for case in (
        _case(
            "resnet-18", lambda config: (ResNet18(config),), _pictures, _one_loss(_classified),
            _RESNET, {"batch": 4, "image": 32, "width": 4},
        ),
        _case(
            "pointnet-cls", lambda config: (graphs_and_points.PointNetClassifier(config),), _clouds,
            _one_loss(_cloud_kinds), _POINTS, {"batch": 4, "points": 16, "classes": 4, "width": 4},
            draws=True,
        ),
        _case(
            "bert-medium", lambda config: (sequence_models.Bert(config),), _masked_pairs,
            _one_loss(_masked_words), _BERT,
            {**sequence_models.BERT_TINY, "batch": 4, "width": 16, "layers": 1}, draws=True,
            optimize=_adam(lr=2e-4),
        ),
        _case(
            "transformer-lm", lambda config: (TransformerLM(config),), _texts,
            _one_loss(_next_words), {**_LM, "dropout": 0.2},
            {"batch": 2, "length": 6, "words": 11, "width": 8}, draws=True,
        ),
        _case(
            "dcgan",
            lambda config: (gans.DCGANGenerator(config), gans.DCGANDiscriminator(config)),
            _discs, _play, _GAN, {"batch": 4, "image": 16, "width": 4, "noise": 8},
            optimize=_adam(lr=2e-4, betas=(0.5, 0.999)),
        ),
        _case(
            "mobilenet-v3-large", lambda config: (lean_image_classifiers.MobileNetV3(config),),
            _pictures, _one_loss(_classified), _MOBILE,
            {"batch": 4, "image": 16, "width": 0.25, "classes": 4}, draws=True,
            optimize=_rmsprop,
        ),
        _case(
            "pointnet-seg", lambda config: (graphs_and_points.PointNetSegmenter(config),),
            _cloud_parts, _one_loss(_cloud_kinds), _PARTS,
            {"batch": 4, "points": 16, "classes": 2, "parts": 6, "width": 4},
        ),
        _case(
            "resnet-18-whole-pictures", lambda config: (ResNet18(config),), _pictures,
            _one_loss(_classified), {**_RESNET, "halves": False},
            {"batch": 4, "image": 8, "width": 4},
        ),
    )
}  # fmt: skip
