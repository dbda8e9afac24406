"""ResNet-50 with a loader that cannot keep up, in the shape of PyTorch's ImageNet example.

    python benchmarks/gpu/resnet_loader.py [--epochs 4] [--batches 100] [--load-ms 170]

Four workers need --load-ms for a batch and start together, so every fourth step waits. Each epoch
ends with a validation and a checkpoint. The meters are those of the example: batch_time and
data_time. The last line is JSON with what they read, step by step. It knows nothing of stepscope.
Runs on a CPU too (--small for a tiny network there). Needs torch; torchvision if it is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

BEGAN_UNIX = time.time()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class AverageMeter:
    """Computes and stores the average and every value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)

    @property
    def avg(self) -> float:
        return sum(self.values) / max(1, len(self.values))

    def __str__(self) -> str:
        return f"{self.name} {self.values[-1]:.3f} ({self.avg:.3f})"


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Bytes that are made into normalised floats; reading and decoding is a wait."""

    def __init__(self, count: int, size: int, wait_s: float) -> None:
        self.count, self.wait_s = count, wait_s
        self.stored = torch.randint(0, 256, (16, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        return self.stored[index % 16].float().div_(255).sub_(0.5), index % 1000


class Bottleneck(nn.Module):
    """ResNet-50's block, for machines without torchvision."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            *_convolution(inside, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outside, 1),
        )
        is_same = inside == outside and stride == 1
        self.shortcut = (
            nn.Identity() if is_same else nn.Sequential(*_convolution(inside, outside, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(inside: int, outside: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outside),
    ]


def resnet50(widths: tuple[int, ...], blocks: tuple[int, ...]) -> nn.Module:
    first = widths[0]
    layers: list[nn.Module] = [
        *_convolution(3, first, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = first
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for block in range(count):
            layers.append(Bottleneck(inside, width, 2 if stage and not block else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def build_model(options: argparse.Namespace) -> nn.Module:
    if options.small:
        return resnet50((8, 16), (1, 1))
    try:
        from torchvision.models import resnet50 as from_torchvision
    except ImportError:
        return resnet50((64, 128, 256, 512), (3, 4, 6, 3))
    return from_torchvision()


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.topk(5, 1).indices == target[:, None]).any(1).float().mean()


def train(
    loader: DataLoader[tuple[torch.Tensor, int]],
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    device: torch.device,
) -> tuple[AverageMeter, AverageMeter]:
    batch_time, data_time = AverageMeter("Time"), AverageMeter("Data")
    losses, top5 = AverageMeter("Loss"), AverageMeter("Acc@5")
    model.train()
    end = time.time()
    for number, (images, target) in enumerate(loader):
        data_time.update(time.time() - end)
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        target = target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            output = model(images)
            loss = criterion(output, target)
        losses.update(loss.item())
        top5.update(accuracy(output, target).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if number % 10 == 0:
            print(f"Epoch [{epoch}][{number}]", batch_time, data_time, losses, top5, sep="\t")
    return batch_time, data_time


def validate(
    loader: DataLoader[tuple[torch.Tensor, int]],
    model: nn.Module,
    criterion: nn.Module,
    device: torch.device,
) -> float:
    losses = AverageMeter("Loss")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            output = model(images)
            losses.update(criterion(output, target.to(device)).item())
    return losses.avg


def main() -> None:
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = build_model(options).to(device, memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    wait_s = options.load_ms / 1e3 / options.batch
    training = DataLoader(
        Pictures(options.batches * options.batch, options.size, wait_s),
        options.batch,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    held_out = DataLoader(
        Pictures(10 * options.batch, options.size, wait_s / 4),
        options.batch,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    truth: dict[str, list[float]] = {
        "batch_ms": [],
        "data_ms": [],
        "validate_ms": [],
        "save_ms": [],
    }
    first_epoch = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        for epoch in range(options.epochs):
            batch_time, data_time = train(training, model, criterion, optimizer, epoch, device)
            truth["batch_ms"] += [1e3 * value for value in batch_time.values]
            truth["data_ms"] += [1e3 * value for value in data_time.values]
            began = time.time()
            validate(held_out, model, criterion, device)
            truth["validate_ms"].append(1e3 * (time.time() - began))
            schedule.step()
            began = time.time()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(scratch) / "checkpoint.pth.tar")
            truth["save_ms"].append(1e3 * (time.time() - began))
    ended = time.time()
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "epochs": options.epochs,
        "workers": options.workers,
        "start_up_ms": 1e3 * (first_epoch - BEGAN_UNIX),
        "loop_ms": 1e3 * (ended - first_epoch),
    }
    line = json.dumps({**facts, **truth})
    print(line, flush=True)
    if options.save:
        options.save.write_text(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batches", type=int, default=100, help="of an epoch")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="of a picture")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--load-ms", type=float, default=170, help="of a worker for one batch")
    parser.add_argument("--small", action="store_true", help="a tiny network")
    parser.add_argument("--save", type=Path, help="write the last line here as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
