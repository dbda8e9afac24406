"""Image classifiers and image generators of the suite: their size, their steps, their targets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.bench.catalogue import load
from stepscope.bench.workload import TrainingPlace
from stepscope.bench.workloads.gans import (
    DCGANDiscriminator,
    DCGANGenerator,
    WGANCritic,
    WGANGenerator,
    gradient_penalty,
)
from stepscope.bench.workloads.image_classifiers import VGG, ResNet, make_stripes
from stepscope.bench.workloads.image_generators import DiffusionUNet
from stepscope.bench.workloads.lean_image_classifiers import InceptionV3, MobileNetV3

NAMES = (
    "resnet50",
    "inception-v3",
    "vgg16",
    "mobilenet-v3-large",
    "dcgan",
    "wgan-gp",
    "diffusion-unet",
)
CPU = torch.device("cpu")

# By hand, layer by layer: weights of convolutions and linear layers, biases, scales and shifts.
DCGAN_GENERATOR = (
    100 * 1024 * 16
    + 25 * (1024 * 512 + 512 * 256 + 256 * 128 + 128 * 3)
    + 2 * (1024 + 512 + 256 + 128)
)
DCGAN_DISCRIMINATOR = (
    25 * (3 * 128 + 128 * 256 + 256 * 512 + 512 * 1024) + 2 * (256 + 512 + 1024) + 16 * 1024 + 1
)


def growing(a: int, b: int) -> int:
    return 2 * a + 9 * a * b + 2 * b + 9 * b * b + b + a * b + b


def shrinking(a: int, b: int) -> int:
    return 2 * a + 9 * a * a + 2 * a + 9 * a * b + b + a * b + b


WGAN_GENERATOR = (
    (128 + 1) * 16 * 512
    + sum(growing(a, b) for a, b in ((512, 512), (512, 256), (256, 128), (128, 64)))
    + (2 * 64 + 9 * 64 * 3 + 3)
)
WGAN_CRITIC = (
    (9 * 3 * 64 + 64)
    + sum(shrinking(a, b) for a, b in ((64, 128), (128, 256), (256, 512), (512, 512)))
    + (16 * 512 + 1)
)


@pytest.mark.parametrize(
    ("name", "model", "parameters"),
    [
        ("resnet50", ResNet, 25.557e6),  # torchvision's table of its weights: resnet50
        ("inception-v3", InceptionV3, 27.161e6),  # the same table: inception_v3, with both heads
        ("vgg16", VGG, 138e6),  # Simonyan and Zisserman, table 2: configuration D
        ("mobilenet-v3-large", MobileNetV3, 5.483e6),  # the same table; the paper: 5.4 M
        ("dcgan", DCGANGenerator, DCGAN_GENERATOR),
        ("dcgan", DCGANDiscriminator, DCGAN_DISCRIMINATOR),
        ("wgan-gp", WGANGenerator, WGAN_GENERATOR),
        ("wgan-gp", WGANCritic, WGAN_CRITIC),
        ("diffusion-unet", DiffusionUNet, 35.7e6),  # Ho et al., appendix B: CIFAR-10 model
    ],
)
def test_parameters_are_as_many_as_published(
    name: str, model: type[nn.Module], parameters: float
) -> None:
    with torch.device("meta"):
        net = model(load(name).config("paper"))
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(parameters, rel=0.01)


def losses(name: str, steps: int, seed: int = 0, **changes: object) -> list[float]:
    workload = load(name)
    torch.manual_seed(seed)
    step = workload.build(workload.config("tiny", changes), TrainingPlace(CPU, seed=seed))
    return [step(number).item() for number in range(steps)]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_two_tiny_steps_are_finite_and_repeatable(name: str) -> None:
    first = losses(name, 2)
    assert torch.tensor(first).isfinite().all()
    assert first[0] != first[1]
    assert losses(name, 2) == first


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_changes_the_samples_of_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first convolution is given: with two nets, the larger of both."""
    seen = []
    convolve = nn.Conv2d.forward

    def forward(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 3:
            seen.append(len(x))
        return convolve(layer, x)

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    assert torch.tensor(losses(name, 1, batch="3")).isfinite().all()
    assert set(seen) <= {3, 6}  # 6: real and generated images in one pass
    assert 3 in seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bf16
@pytest.mark.parametrize("name", NAMES)
def test_trains_under_bf16_autocast_with_channels_last(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(_place: TrainingPlace, model: nn.Module) -> nn.Module:
        return model.to(memory_format=torch.channels_last)

    monkeypatch.setattr(TrainingPlace, "put", put)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.tensor(losses(name, 1)).isfinite().all()


def test_stripes_follow_from_the_label_on_every_rank() -> None:
    """Images of one label on two ranks are more alike than those of two labels."""
    config = load("resnet50").config("tiny", {"batch": "64", "directions": "2"})
    sides = []
    for rank in (0, 1):
        images, labels = make_stripes(config, TrainingPlace(CPU, rank=rank, ranks=2))[0]
        sides.append([images[labels == label].mean(0).flatten() for label in (0, 1)])
    assert not torch.equal(sides[0][0], sides[1][0])
    likeness = nn.functional.cosine_similarity
    for label in (0, 1):
        same = likeness(sides[0][label], sides[1][label], dim=0)
        other = likeness(sides[0][label], sides[1][1 - label], dim=0)
        assert same > 0.8 > abs(other)


def test_penalty_is_of_the_gradients_length() -> None:
    """The critic 3 * sum has a gradient of 3 in each of n pixels: (3 * sqrt(n) - 1) squared."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.scale * images.sum((1, 2, 3))

    critic, images = Sum(), torch.randn(2, 1, 2, 2)
    penalty = gradient_penalty(critic, images, -images)
    assert penalty.item() == pytest.approx((3 * 2 - 1) ** 2)
    penalty.backward()
    assert critic.scale.grad is not None
    assert critic.scale.grad.item() == pytest.approx(2 * (3 * 2 - 1) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tiny_reaches_its_target(name: str, seed: int) -> None:
    target = load(name).targets["tiny"]
    found = losses(name, target.steps, seed)
    assert found[0] > target.loss
    assert sum(found[-target.over :]) / target.over < target.loss
