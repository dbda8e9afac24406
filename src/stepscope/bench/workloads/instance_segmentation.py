"""Mask R-CNN: proposes regions, then says of each what it is, its box and its mask.

The number of proposals is fixed and they are not thinned out, so no shape depends on the data.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload, descend
from stepscope.bench.workloads.building_blocks import SGD, in_sizes, initialize_convolutions
from stepscope.bench.workloads.image_classifiers import resnet_stages, resnet_stem
from stepscope.bench.workloads.object_detection import (
    crop_regions,
    decode,
    encode,
    inside,
    make_anchors,
    make_scenes,
    match,
    overlap,
    picked,
)

STRIDES = (4, 8, 16, 32, 64)
SHAPES = 3  # of anchors in a cell
BOX_BINS, MASK_BINS = 7, 14  # cells that a region is cut into, each way


class ResNetPyramid(nn.Module):
    """ResNet's four levels, coarse ones added to finer ones; a fifth is thinned from the fourth."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = resnet_stem(config.width)
        self.stages, self.lateral, self.smooth = (nn.ModuleList() for _ in range(3))
        for blocks, outputs in resnet_stages(config):
            self.stages.append(nn.Sequential(*blocks))
            self.lateral.append(nn.Conv2d(outputs, config.pyramid_width, 1))
            self.smooth.append(nn.Conv2d(config.pyramid_width, config.pyramid_width, 3, padding=1))
        initialize_convolutions(self.stem)
        initialize_convolutions(self.stages)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        x, maps = self.stem(images), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            maps.append(lateral(x))
        for at in (2, 1, 0):
            maps[at] = maps[at] + functional.interpolate(maps[at + 1], scale_factor=2.0)
        levels = [smooth(x) for smooth, x in zip(self.smooth, maps, strict=True)]
        return [*levels, functional.max_pool2d(levels[3], 1, 2)]


class MaskRCNN(nn.Module):
    """Returns its loss; anchors and which of them are to find what come from outside."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, hidden, classes = config.pyramid_width, config.hidden, config.classes
        self.pyramid = ResNetPyramid(config)
        self.propose = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.object, self.shift = nn.Conv2d(width, SHAPES, 1), nn.Conv2d(width, 4 * SHAPES, 1)
        self.box_layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(width * BOX_BINS**2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )
        # The last class is the background.
        self.kind, self.box = nn.Linear(hidden, classes), nn.Linear(hidden, 4 * classes)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.mask = nn.Sequential(
            *layers, nn.ConvTranspose2d(width, width, 2, 2), nn.ReLU(), nn.Conv2d(width, classes, 1)
        )
        for last in (self.object, self.shift, self.kind, self.box):
            nn.init.normal_(last.weight, std=0.01)
            nn.init.zeros_(last.bias)

    def forward(
        self,
        images: torch.Tensor,
        boxes: torch.Tensor,
        kinds: torch.Tensor,
        anchors: torch.Tensor,
        positive: torch.Tensor,
        codes: torch.Tensor,
    ) -> torch.Tensor:
        levels = self.pyramid(images)
        shared = [self.propose(x) for x in levels]
        scores = torch.cat([of_anchors(self.object(x), 1) for x in shared], 1)[..., 0].float()
        shifts = torch.cat([of_anchors(self.shift(x), 4) for x in shared], 1).float()
        loss = balanced(scores, positive) + mean_where(box_loss(shifts, codes), positive)
        with torch.no_grad():
            best = scores.topk(self.config.proposals, 1).indices
            found = decode(anchors[best], picked(shifts, best))
            regions, index, is_object = self.choose(found, boxes, images.shape[2:])
        object_boxes, object_kinds = picked(boxes, index), picked(kinds, index)
        edge = self.config.edge_at_stride_16

        seen = self.box_layers(crop_regions(levels, regions, BOX_BINS, edge))
        background = self.config.classes - 1
        wanted = torch.where(is_object, object_kinds, background).flatten()
        loss = loss + functional.cross_entropy(self.kind(seen).float(), wanted)
        of_kind = self.box(seen).float().unflatten(1, (-1, 4))
        code = of_kind.gather(1, wanted[:, None, None].expand(-1, 1, 4))[:, 0]
        off = box_loss(code, encode(regions, object_boxes).flatten(0, 1))
        loss = loss + mean_where(off, is_object.flatten())

        some = self.config.regions // 4  # the only ones that may be objects
        masks = self.mask(crop_regions(levels, regions[:, :some], MASK_BINS, edge)).float()
        chosen = object_kinds[:, :some].reshape(-1, 1, 1, 1).expand(-1, 1, *masks.shape[2:])
        masks = masks.gather(1, chosen)[:, 0]
        truth = true_masks(regions[:, :some], object_boxes[:, :some], object_kinds[:, :some])
        wrong = functional.binary_cross_entropy_with_logits(masks, truth, reduction="none")
        return loss + mean_where(wrong.mean((1, 2)), is_object[:, :some].flatten())

    def choose(
        self, found: torch.Tensor, boxes: torch.Tensor, size: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Regions to learn from: a quarter that overlaps objects most, and random others.

        The objects' own boxes are among them. With each comes the object and whether it is one.
        """
        count, edge = self.config.regions, boxes.new_tensor([size[1], size[0]])
        corner = torch.minimum(found[..., :2].clamp(min=0), edge - 2)
        found = torch.cat((corner, torch.minimum(found[..., 2:], edge).maximum(corner + 1)), 2)
        found = torch.cat((found, boxes), 1)
        most, index = overlap(found, boxes).max(2)
        first = most.topk(count // 4, 1).indices
        chance = torch.rand_like(most).scatter(1, first, -1.0)
        chosen = torch.cat((first, chance.topk(count - count // 4, 1).indices), 1)
        is_object = (most.gather(1, chosen) >= 0.5) & (
            torch.arange(count, device=boxes.device) < count // 4
        )
        return picked(found, chosen), index.gather(1, chosen), is_object


def of_anchors(x: torch.Tensor, values: int) -> torch.Tensor:
    """(batch, anchors, values), in the order of make_anchors."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, values)


def mean_where(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (values * counts).sum() / counts.sum().clamp(min=1)


def balanced(scores: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in which the few objects weigh as much as the background."""
    wrong = functional.binary_cross_entropy_with_logits(
        scores, positive.to(scores.dtype), reduction="none"
    )
    return (mean_where(wrong, positive) + mean_where(wrong, ~positive)) / 2


def box_loss(codes: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.smooth_l1_loss(codes, wanted, reduction="none", beta=1 / 9).sum(-1)


def true_masks(regions: torch.Tensor, boxes: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Which points of a region belong to its object: (batch * regions, points, points)."""
    points = 2 * MASK_BINS
    left, top, right, bottom = regions.flatten(0, 1)[..., None, None].unbind(1)
    at = (torch.arange(points, device=regions.device) + 0.5) / points
    x, y = left + (right - left) * at, top + (bottom - top) * at[:, None]
    return inside(x, y, boxes.flatten(0, 1)[..., None, None], kinds.reshape(-1, 1, 1)).float()


def build_mask_rcnn(config: Config, place: TrainingPlace) -> Step:
    model = place.put(MaskRCNN(config))
    optimizer = SGD(model.parameters(), lr=config.lr)
    anchors = make_anchors(config, STRIDES, (float(config.anchor_scale),), place.device)
    scenes = make_scenes(config, place)
    matches = [match(anchors, each.boxes, 0.7) for each in scenes]

    def step(number: int) -> torch.Tensor:
        at = number % len(scenes)
        scene, (index, positive) = scenes[at], matches[at]
        codes = encode(anchors, picked(scene.boxes, index))
        loss = model(scene.images, scene.boxes, scene.kinds, anchors, positive, codes)
        return descend(optimizer, loss, clip=2.0)  # the start is random, not pretrained

    return step


# Images are multiples of 64: 800 x 1333 and what pads it. Of the classes only `kinds` occur. The
# anchors' scale is in strides, regions of `edge_at_stride_16` are cut from the third level, and the
# heads learn from `regions` of an image.
R50_FPN = {
    "batch": 2, "batches": 4, "image_height": 832, "image_width": 1344, "objects": 8, "kinds": 20,
    "classes": 91, "blocks": "3,4,6,3", "width": 64, "pyramid_width": 256, "hidden": 1024,
    "anchor_scale": 8, "edge_at_stride_16": 224, "proposals": 1000, "regions": 512, "lr": 0.005,
}  # fmt: skip
MASK_RCNN_TINY = {
    "image_height": 64, "image_width": 64, "objects": 2, "kinds": 4, "classes": 5,
    "blocks": "1,1,1,1", "width": 8, "pyramid_width": 16, "hidden": 32, "anchor_scale": 4,
    "edge_at_stride_16": 32, "proposals": 32, "regions": 16, "lr": 0.02,
}  # fmt: skip
MASK_RCNN_WORKLOAD = TrainingWorkload(
    name="mask-rcnn",
    task="instance segmentation",
    source="He et al., Mask R-CNN, 2017 (ResNet-50-FPN, 44 M)",
    samples="images",
    sizes=in_sizes(R50_FPN, tiny=MASK_RCNN_TINY, paper={"batch": 16}),
    targets={"tiny": Target(2.5, 60), "small": Target(6.5, 60), "paper": Target(6.5, 60)},
    build=build_mask_rcnn,
    tags=frozenset({"convolutional", "detection"}),
)
