"""What convolutions take on a GPU in fp32, tf32 and bf16: rows that predict/tensor_cores.py is
fitted to.

    python benchmarks/convolution_costs.py --save convolutions.json [--seconds 90] [--tiny]

Shapes of well-known nets, then random ones. Forward, and backward with both gradients, by the
device's clock, with cuDNN's own choice of algorithm. It ends when its seconds are over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAYS = ("fp32", "tf32", "bf16")
_WARM_UP, _TIMED = 2, 4
_LEAST_FLOPS, _MOST_FLOPS, _MOST_BYTES = 2e8, 4e11, 1.2e9
_BATCHES, _CHANNELS = (8, 16, 32, 64, 128, 256), (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_SIDES, _KERNELS = (7, 8, 14, 17, 19, 28, 32, 35, 56, 64, 112, 128, 224), ((1, 1), (3, 3), (3, 3))
_ODD_KERNELS = ((5, 5), (7, 7), (1, 7), (7, 1), (1, 3))


@dataclass(frozen=True, slots=True)
class Shape:
    batch: int
    inputs: int  # channels
    outputs: int
    side: int
    kernel: tuple[int, int]
    stride: int = 1

    @property
    def out_side(self) -> int:
        return -(-self.side // self.stride)

    @property
    def flops(self) -> float:
        taps = self.kernel[0] * self.kernel[1]
        return 2.0 * self.batch * self.out_side**2 * self.outputs * self.inputs * taps

    @property
    def bytes_moved(self) -> float:
        read = self.batch * self.inputs * self.side**2
        return 4.0 * (read + self.batch * self.outputs * self.out_side**2)


def known_shapes() -> Iterator[Shape]:
    """VGG-16, ResNet-50, Inception-v3's long kernels, a U-Net, a pyramid, a board game's net."""
    widths = ((3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56))
    for inputs, outputs, side in (*widths, (256, 256, 56), (256, 512, 28), (512, 512, 28)):
        yield Shape(64, inputs, outputs, side, (3, 3))
    yield Shape(64, 512, 512, 14, (3, 3))
    yield Shape(64, 3, 64, 224, (7, 7), 2)
    for width, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
        yield Shape(64, 4 * width, width, side, (1, 1))
        yield Shape(64, width, width, side, (3, 3))
        yield Shape(64, width, 4 * width, side, (1, 1))
        yield Shape(64, width, width, 2 * side, (3, 3), 2)
        yield Shape(64, 2 * width, 4 * width, 2 * side, (1, 1), 2)
    for width in (128, 160, 192):
        yield Shape(64, width, width, 17, (1, 7))
        yield Shape(64, width, width, 17, (7, 1))
    for width, side in ((128, 32), (256, 16), (384, 16), (512, 8), (256, 8)):
        yield Shape(128, width, width, side, (3, 3))
    for side in (13, 25, 50, 100):
        yield Shape(8, 256, 256, side, (3, 3))
    yield Shape(256, 128, 128, 19, (3, 3))
    yield Shape(256, 17, 128, 19, (3, 3))


def random_shapes(seed: int = 0) -> Iterator[Shape]:
    draw = random.Random(seed)
    while True:
        shape = Shape(
            draw.choice(_BATCHES),
            draw.choice(_CHANNELS),
            draw.choice(_CHANNELS),
            draw.choice(_SIDES),
            draw.choice((*_KERNELS, draw.choice(_ODD_KERNELS))),
            draw.choice((1, 1, 1, 2)),
        )
        if _LEAST_FLOPS < shape.flops < _MOST_FLOPS and shape.bytes_moved < _MOST_BYTES:
            yield shape


def times_ns(shape: Shape, way: str, device: torch.device) -> dict[str, int]:
    """Forward and backward."""
    torch.backends.cudnn.allow_tf32 = way == "tf32"
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    padding = [size // 2 for size in shape.kernel]
    images = torch.randn(
        shape.batch, shape.inputs, shape.side, shape.side, device=device, dtype=dtype
    )
    weight = torch.randn(shape.outputs, shape.inputs, *shape.kernel, device=device, dtype=dtype)
    stride = [shape.stride] * 2
    options = (stride, padding, [1, 1], False, [0, 0], 1)
    output = torch.ops.aten.convolution(images, weight, None, *options)
    gradient = torch.randn_like(output)

    def forward() -> Any:
        return torch.ops.aten.convolution(images, weight, None, *options)

    def backward() -> Any:
        return torch.ops.aten.convolution_backward(
            gradient, images, weight, None, *options, [True, True, False]
        )

    return {"forward": _ns(forward, device), "backward": _ns(backward, device)}


def _ns(call: Callable[[], Any], device: torch.device) -> int:
    for _ in range(_WARM_UP):
        call()
    if device.type != "cuda":
        began = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - began
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host runs ahead
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return round(1e6 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--tiny", action="store_true", help="a few small ones, also on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    end, rows = time.monotonic() + options.seconds, []
    shapes = [*known_shapes()] if not options.tiny else [Shape(2, 8, 8, 8, (3, 3))]
    for shape in itertools.chain(shapes, () if options.tiny else random_shapes()):
        rows += [{**asdict(shape), "way": way, **times_ns(shape, way, device)} for way in WAYS]
        torch.cuda.empty_cache()
        if time.monotonic() > end:
            break
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    options.save.write_text(json.dumps({"device": name, "rows": rows}))
    print(f"{len(rows)} rows", flush=True)


if __name__ == "__main__":
    main()
