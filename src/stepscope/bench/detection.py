"""What the detectors share: made-up scenes, anchors, and which object an anchor is to find.

Boxes are corners in pixels: left, top, right, bottom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.bench.workload import Config, TrainingPlace

FINEST_STRIDE = 4  # pixels for each point of the finest level that regions are cut from


@dataclass(frozen=True, slots=True)
class Scenes:
    """A batch of images with the same number of objects in each."""

    images: torch.Tensor  # (batch, 3, height, width)
    boxes: torch.Tensor  # (batch, objects, 4)
    kinds: torch.Tensor  # (batch, objects)


def make_scenes(config: Config, place: TrainingPlace) -> list[Scenes]:
    """Objects on noise: colour and form follow from the kind; later ones cover earlier ones."""
    draw, device = place.generator(), place.device
    count, size = (config.batch, config.objects), (config.image_height, config.image_width)
    edge = torch.tensor([config.image_width, config.image_height], device=device)
    across = torch.arange(config.image_width, device=device) + 0.5
    down = torch.arange(config.image_height, device=device)[:, None] + 0.5
    scenes = []
    for _ in range(config.batches):
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
        scenes.append(Scenes(images, boxes, kinds))
    return scenes


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
