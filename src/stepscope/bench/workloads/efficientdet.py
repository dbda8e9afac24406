"""EfficientDet-D0: finds objects in one pass; levels of the image are mixed up and down (BiFPN)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.detection import encode, make_anchors, make_scenes, match, picked
from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.mobilenet_v3_large import convolution, whole_eights

if TYPE_CHECKING:
    from stepscope.bench.detection import Scenes
    from stepscope.bench.workload import Config, Step, TrainingPlace

# EfficientNet-B0: kernel, expansion, channels, repeats, stride, and whether the level is an output.
STAGES = (
    (3, 1, 16, 1, 1, False),
    (3, 6, 24, 2, 2, False),
    (5, 6, 40, 2, 2, True),
    (3, 6, 80, 3, 2, False),
    (5, 6, 112, 3, 1, True),
    (5, 6, 192, 4, 2, False),
    (3, 6, 320, 1, 1, True),
)
STRIDES = (8, 16, 32, 64, 128)
ANCHORS, SCALES = 9, (4.0, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3))


class GatedBlock(nn.Module):
    """Widen, convolve each channel alone, gate the channels, narrow."""

    def __init__(self, inputs: int, outputs: int, size: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide, squeezed = inputs * expansion, max(1, inputs // 4)
        widen = (*convolution(inputs, wide, 1), nn.SiLU()) if expansion > 1 else ()
        each = convolution(wide, wide, size, stride, groups=wide)
        self.widen = nn.Sequential(*widen, *each, nn.SiLU())
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, squeezed, 1),
            nn.SiLU(),
            nn.Conv2d(squeezed, wide, 1),
            nn.Sigmoid(),
        )
        self.narrow = nn.Sequential(*convolution(wide, outputs, 1))
        self.same = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.widen(x)
        y = self.narrow(y * self.gate(y))
        return x + y if self.same else y


def separable(inputs: int, outputs: int) -> nn.Sequential:
    each = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
    return nn.Sequential(each, nn.Conv2d(inputs, outputs, 1))


class FusionNode(nn.Module):
    """A weighted mean of maps of one size, then a convolution."""

    def __init__(self, maps: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(maps))
        self.layers = nn.Sequential(
            nn.SiLU(), separable(width, width), nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)
        )

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        weights = functional.relu(self.weights)
        weights = weights / (weights.sum() + 1e-4)
        mixed = sum(weight * each for weight, each in zip(weights, maps, strict=True))
        fused: torch.Tensor = self.layers(mixed)
        return fused


class BiFPN(nn.Module):
    """Mixes five levels downwards, coarse into fine, then upwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.downwards = nn.ModuleList(FusionNode(2, width) for _ in range(4))
        self.upwards = nn.ModuleList(FusionNode(3 if at < 3 else 2, width) for at in range(4))

    def forward(self, levels: list[torch.Tensor], again: list[torch.Tensor]) -> list[torch.Tensor]:
        """`again` are the levels as the way upwards takes them."""
        down = [levels[4]]
        for at in (3, 2, 1, 0):
            finer = functional.interpolate(down[0], scale_factor=2.0)
            down.insert(0, self.downwards[at](levels[at], finer))
        up = [down[0]]
        for at, node in enumerate(self.upwards, 1):
            coarser = functional.max_pool2d(up[-1], 3, 2, 1)
            skipped = (again[at], down[at]) if at < 4 else (again[at],)
            up.append(node(*skipped, coarser))
        return up


class DetectionHead(nn.Module):
    """The levels share the convolutions; each has norms of its own. (batch, anchors, outputs)."""

    def __init__(self, width: int, depth: int, outputs: int, bias: float) -> None:
        super().__init__()
        self.outputs = outputs
        self.layers = nn.ModuleList(separable(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.BatchNorm2d(width, eps=1e-3, momentum=0.01) for _ in range(depth))
            for _ in STRIDES
        )
        self.last = separable(width, ANCHORS * outputs)
        nn.init.constant_(self.last[1].bias, bias)

    def forward(self, levels: list[torch.Tensor]) -> torch.Tensor:
        answers = []
        for x, norms in zip(levels, self.norms, strict=True):
            for layer, norm in zip(self.layers, norms, strict=True):
                x = functional.silu(norm(layer(x)))
            x = self.last(x).permute(0, 2, 3, 1)
            answers.append(x.reshape(len(x), -1, self.outputs))
        return torch.cat(answers, 1)


class EfficientDet(nn.Module):
    """Every anchor's logits for the classes, and its box."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        inputs = whole_eights(32 * config.width)
        self.stem = nn.Sequential(*convolution(3, inputs, 3, 2), nn.SiLU())
        self.stages, widths = nn.ModuleList(), []
        for size, expansion, channels, repeats, stride, is_output in STAGES:
            outputs, blocks = whole_eights(channels * config.width), []
            for number in range(min(repeats, config.most_repeats)):
                stride = 1 if number else stride
                blocks.append(GatedBlock(inputs, outputs, size, expansion, stride))
                inputs = outputs
            self.stages.append(nn.Sequential(*blocks))
            widths += [outputs] if is_output else []
        width = config.pyramid_width
        to_width = lambda inputs: nn.Sequential(nn.Conv2d(inputs, width, 1), nn.BatchNorm2d(width))  # noqa: E731
        self.enter = nn.ModuleList(map(to_width, (*widths, widths[2])))
        self.enter_again = nn.ModuleList(map(to_width, widths[1:]))
        self.pyramid = nn.ModuleList(BiFPN(width) for _ in range(config.pyramids))
        self.kinds = DetectionHead(width, config.head_depth, config.classes, bias=-4.6)  # 1%
        self.boxes = DetectionHead(width, config.head_depth, 4, bias=0.0)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, maps = self.stem(images), []
        for stage, (*_, is_output) in zip(self.stages, STAGES, strict=True):
            x = stage(x)
            maps += [x] if is_output else []
        levels = [enter(x) for enter, x in zip(self.enter, (*maps, maps[2]), strict=True)]
        levels[3] = functional.max_pool2d(levels[3], 3, 2, 1)
        levels.append(functional.max_pool2d(levels[3], 3, 2, 1))
        middle = [enter(x) for enter, x in zip(self.enter_again, maps[1:], strict=True)]
        again = [levels[0], *middle, *levels[3:]]
        for layer in self.pyramid:
            levels = again = layer(levels, again)
        return self.kinds(levels), self.boxes(levels)


def wanted_answers(scenes: Scenes, anchors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of every anchor: whether it is to find an object, the object's kind and its code."""
    index, positive = match(anchors, scenes.boxes, 0.5)
    code = encode(anchors, picked(scenes.boxes, index))
    return positive, picked(scenes.kinds, index), code


def focal_loss(logits: torch.Tensor, positive: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Cross-entropy that hardly counts what is known already, mostly the background."""
    wanted = functional.one_hot(kinds, logits.shape[2]) * positive[..., None]
    wanted = wanted.to(logits.dtype)
    wrong = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    missed = (wanted - logits.sigmoid()).abs()
    return ((0.75 - 0.5 * wanted) * missed**1.5 * wrong).sum()


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(EfficientDet(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=4e-5)
    anchors = make_anchors(config, STRIDES, SCALES, place.device)
    scenes = make_scenes(config, place)
    answers = [wanted_answers(each, anchors) for each in scenes]

    def step(number: int) -> torch.Tensor:
        at = number % len(scenes)
        positive, kinds, codes = answers[at]
        logits, boxes = model(scenes[at].images)
        off = functional.huber_loss(boxes.float(), codes, reduction="none", delta=0.1).sum(2)
        loss = focal_loss(logits.float(), positive, kinds) + 12.5 * (off * positive).sum()
        loss = loss / (positive.sum() + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


D0 = {
    "batch": 16,
    "batches": 4,  # that training goes round
    "image_height": 512,
    "image_width": 512,
    "objects": 8,
    "kinds": 20,  # that occur
    "classes": 90,
    "width": 1.0,  # EfficientNet's multiplier
    "most_repeats": 4,  # of a block
    "pyramid_width": 64,
    "pyramids": 3,
    "head_depth": 3,
    "lr": 0.02,
}
TINY = {
    "batch": 4, "image_height": 128, "image_width": 128, "objects": 3, "kinds": 4, "classes": 4,
    "width": 0.25, "most_repeats": 1, "pyramid_width": 16, "pyramids": 1, "head_depth": 1,
    "batches": 2, "lr": 0.04,
}  # fmt: skip
WORKLOAD = TrainingWorkload(
    name="efficientdet",
    task="object detection",
    source="Tan et al., EfficientDet, 2020 (D0, 3.9 M)",
    samples="images",
    sizes={"tiny": {**D0, **TINY}, "small": D0, "paper": {**D0, "batch": 128, "lr": 0.08}},
    targets={
        "tiny": Target(loss=1.4, steps=40),
        "small": Target(loss=2.0, steps=60),
        "paper": Target(loss=2.0, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "detection"}),
)
