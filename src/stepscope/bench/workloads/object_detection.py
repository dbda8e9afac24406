"""Find objects in one pass (EfficientDet-D0); and what both detectors share: made-up scenes,
anchors, and which object an anchor is to find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload, descend
from stepscope.bench.workloads.building_blocks import (
    in_batches,
    in_sizes,
    lean_convolution,
    whole_eights,
)

# What the detectors share: made-up scenes, anchors, and which object an anchor is to find.
#
# Boxes are corners in pixels: left, top, right, bottom.

FINEST_STRIDE = 4  # pixels for each point of the finest level that regions are cut from


@dataclass(frozen=True, slots=True)
class Scenes:
    """A batch of images with the same number of objects in each."""

    images: torch.Tensor  # (batch, 3, height, width)
    boxes: torch.Tensor  # (batch, objects, 4)
    kinds: torch.Tensor  # (batch, objects)


@in_batches
def make_scenes(config: Config, draw: torch.Generator) -> Iterator[Scenes]:
    """Objects on noise: colour and form follow from the kind; later ones cover earlier ones."""
    device = draw.device
    count, size = (config.batch, config.objects), (config.image_height, config.image_width)
    edge = torch.tensor([config.image_width, config.image_height], device=device)
    across = torch.arange(config.image_width, device=device) + 0.5
    down = torch.arange(config.image_height, device=device)[:, None] + 0.5
    while True:
        kinds = torch.randint(config.kinds, count, generator=draw, device=device)
        extent = (0.15 + 0.35 * torch.rand((*count, 2), generator=draw, device=device)) * edge
        corner = torch.rand((*count, 2), generator=draw, device=device) * (edge - extent)
        boxes = torch.cat((corner, corner + extent), 2)
        images = 0.3 * torch.randn((config.batch, 3, *size), generator=draw, device=device)
        hues = torch.tensor([1.1, 2.3, 3.1], device=device)
        colours = 1.5 * torch.sin((kinds[..., None] + 1) * hues)
        for at in range(config.objects):
            covered = inside(across, down, boxes[:, at, :, None, None], kinds[:, at, None, None])
            paint = covered[:, None] * colours[:, at, :, None, None]
            images = torch.where(covered[:, None], 0.5 * images + paint, images)
        yield Scenes(images, boxes, kinds)


def inside(
    x: torch.Tensor, y: torch.Tensor, boxes: torch.Tensor, kinds: torch.Tensor
) -> torch.Tensor:
    """Whether points belong to objects: odd kinds are ellipses, even ones fill their boxes.

    The coordinates are in dimension 1 of `boxes`; the rest is broadcast.
    """
    left, top, right, bottom = boxes.unbind(1)
    dx, dy = 2 * (x - left) / (right - left) - 1, 2 * (y - top) / (bottom - top) - 1
    ellipse, box = dx.square() + dy.square() < 1, torch.maximum(dx.abs(), dy.abs()) < 1
    return torch.where(kinds % 2 == 1, ellipse, box)


def make_anchors(
    config: Config, strides: Sequence[int], scales: Sequence[float], device: torch.device
) -> torch.Tensor:
    """(anchors, 4): level by level, cell by cell; a scale is in strides and has three shapes."""
    flat = torch.tensor([0.5, 1.0, 2.0], device=device).sqrt()
    shapes = torch.stack((flat, 1 / flat), 1)
    extents = (torch.tensor(scales, device=device)[:, None, None] * shapes).reshape(-1, 2)
    levels = []
    for stride in strides:
        x = (torch.arange(math.ceil(config.image_width / stride), device=device) + 0.5) * stride
        y = (torch.arange(math.ceil(config.image_height / stride), device=device) + 0.5) * stride
        centre = torch.stack(torch.meshgrid(x, y, indexing="xy"), 2).reshape(-1, 1, 2)
        half = extents * stride / 2
        levels.append(torch.cat((centre - half, centre + half), 2).reshape(-1, 4))
    return torch.cat(levels)


def overlap(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Intersection over union of every pair: (batch, boxes, others)."""
    boxes, others = boxes[:, :, None], others[:, None]
    shared = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(
        boxes[..., :2], others[..., :2]
    )
    common = shared.clamp(min=0).prod(3)
    areas = [(each[..., 2:] - each[..., :2]).prod(3) for each in (boxes, others)]
    return common / (areas[0] + areas[1] - common)


def match(
    anchors: torch.Tensor, boxes: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The object that each anchor overlaps most, and whether it is to find it: (batch, anchors).

    An object's best anchor is always to find it.
    """
    pairs = overlap(anchors.expand(len(boxes), -1, -1), boxes)
    most, index = pairs.max(2)
    best_of = (pairs == pairs.amax(1, keepdim=True)) & (pairs > 0)
    best = best_of.any(2)
    return torch.where(best, best_of.byte().argmax(2), index), (most >= threshold) | best


def picked(of_objects: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row `index` of each scene's objects: (batch, n) or (batch, n, 4)."""
    if of_objects.dim() == 3:
        index = index[..., None].expand(-1, -1, of_objects.shape[2])
    return of_objects.gather(1, index)


def encode(anchors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Boxes as shifts and logarithmic stretches of anchors."""
    anchor_extent, extent = anchors[..., 2:] - anchors[..., :2], boxes[..., 2:] - boxes[..., :2]
    shift = (boxes[..., :2] + boxes[..., 2:] - anchors[..., :2] - anchors[..., 2:]) / 2
    return torch.cat((shift / anchor_extent, (extent / anchor_extent).log()), -1)


def decode(anchors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The inverse of encode; stretches are limited, as an untrained net may ask for anything."""
    anchor_extent = anchors[..., 2:] - anchors[..., :2]
    centre = (anchors[..., :2] + anchors[..., 2:]) / 2 + codes[..., :2] * anchor_extent
    half = codes[..., 2:].clamp(-4, 4).exp() * anchor_extent / 2
    return torch.cat((centre - half, centre + half), -1)


def crop_regions(
    levels: list[torch.Tensor], regions: torch.Tensor, bins: int, edge_at_stride_16: int
) -> torch.Tensor:
    """RoI align: (batch * regions, channels, bins, bins), each bin the mean of 2 x 2 points.

    The four levels are laid out on one sheet, so that all regions are sampled in one call.
    """
    height, width = levels[0].shape[2:]
    column = [functional.pad(x, (0, width // 2 - x.shape[3])) for x in levels[1:4]]
    side = torch.cat(column, 2)
    side = functional.pad(side, (0, 0, 0, height - side.shape[2]))
    sheet = torch.cat((levels[0], side), 3)

    corner, extent = regions[..., :2], regions[..., 2:] - regions[..., :2]
    edge = extent.prod(2).sqrt() / edge_at_stride_16
    level = (2 + edge.log2()).floor().clamp(0, 3)[..., None]  # (batch, regions, 1)
    scale = 0.5**level
    step = (torch.arange(2 * bins, device=regions.device) + 0.5) / (2 * bins)
    axes = []
    for at, size in enumerate((width, height)):
        x = (
            corner[..., at : at + 1] + extent[..., at : at + 1] * step
        ) * scale / FINEST_STRIDE - 0.5
        x = x.clamp(min=0).minimum(size * scale - 1)  # stays inside its level
        start = width * (level > 0) if at == 0 else height * (level > 1) * (1 - 2 * scale)
        axes.append(2 * (x + start) / (sheet.shape[3 - at] - 1) - 1)
    batch, count, points = axes[0].shape
    grid = torch.stack(
        (
            axes[0][:, :, None].expand(-1, -1, points, -1),
            axes[1][..., None].expand(-1, -1, -1, points),
        ),
        4,
    )
    sampled = functional.grid_sample(
        sheet.float(), grid.reshape(batch, count * points, points, 2), align_corners=True
    )
    means = functional.avg_pool2d(sampled, 2).unflatten(2, (count, bins))
    return means.transpose(1, 2).flatten(0, 1)


# EfficientDet-D0: finds objects in one pass; levels of the image are mixed up and down (BiFPN).

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
        widen = (*lean_convolution(inputs, wide, 1), nn.SiLU()) if expansion > 1 else ()
        depthwise = lean_convolution(wide, wide, size, stride, groups=wide)
        self.widen = nn.Sequential(*widen, *depthwise, nn.SiLU())
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, squeezed, 1),
            nn.SiLU(),
            nn.Conv2d(squeezed, wide, 1),
            nn.Sigmoid(),
        )
        self.narrow = nn.Sequential(*lean_convolution(wide, outputs, 1))
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
        self.stem = nn.Sequential(*lean_convolution(3, inputs, 3, 2), nn.SiLU())
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


def build_efficientdet(config: Config, place: TrainingPlace) -> Step:
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
        return descend(optimizer, loss)

    return step


# Of the classes only `kinds` occur; `width` is EfficientNet's multiplier; no block is repeated more
# than `most_repeats` times.
D0 = {
    "batch": 16, "batches": 4, "image_height": 512, "image_width": 512, "objects": 8, "kinds": 20,
    "classes": 90, "width": 1.0, "most_repeats": 4, "pyramid_width": 64, "pyramids": 3,
    "head_depth": 3, "lr": 0.02,
}  # fmt: skip
EFFICIENTDET_TINY = {
    "batch": 4, "image_height": 128, "image_width": 128, "objects": 3, "kinds": 4, "classes": 4,
    "width": 0.25, "most_repeats": 1, "pyramid_width": 16, "pyramids": 1, "head_depth": 1,
    "batches": 2, "lr": 0.04,
}  # fmt: skip
EFFICIENTDET_WORKLOAD = TrainingWorkload(
    name="efficientdet",
    task="object detection",
    source="Tan et al., EfficientDet, 2020 (D0, 3.9 M)",
    samples="images",
    sizes=in_sizes(D0, tiny=EFFICIENTDET_TINY, paper={"batch": 128, "lr": 0.08}),
    targets={"tiny": Target(1.4, 40), "small": Target(2.0, 60), "paper": Target(2.0, 60)},
    build=build_efficientdet,
    tags=frozenset({"convolutional", "detection"}),
)
