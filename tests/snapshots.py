"""Hand-written CUDA memory snapshots, as torch.cuda.memory._snapshot() makes them.

    device = Device(); a = device.alloc(3_000_000, STACK); device.free(a); device.snapshot()

A request that fits into no free block takes a new segment. Blocks are cut from its front and never
joined again, which is enough to leave holes.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


MODEL = [
    frame("/site-packages/torch/nn/modules/linear.py", 125, "forward"),
    frame("/home/me/model.py", 31, "forward"),
    frame("/home/me/train.py", 12, "main"),
]
LOADING = [frame("/home/me/train.py", 8, "load"), frame("/home/me/train.py", 12, "main")]
IN_C = [frame("??", 0, "at::native::empty_cuda"), frame("??", 0, "torch::autograd::Engine")]


class Device:
    """A small allocator with a history."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self._next = 0x7F00_0000_0000
        self._time = 1_700_000_000_000_000

    def alloc(self, size: int, frames: list[Any] | None = None) -> int:
        rounded = -(-size // 512) * 512
        block = self._free_block(rounded) or self._new_segment(rounded, frames)
        rest = block["size"] - rounded
        block |= {"state": "active_allocated", "requested_size": size, "frames": frames or []}
        if rest:
            block["size"] = rounded
            hole = {
                "address": block["address"] + rounded,
                "size": rest,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            }
            blocks = next(s["blocks"] for s in self.segments if block in s["blocks"])
            blocks.insert(blocks.index(block) + 1, hole)
        self._note("alloc", block["address"], size, frames)
        return int(block["address"])

    def free(self, address: int) -> None:
        block = next(b for s in self.segments for b in s["blocks"] if b["address"] == address)
        size, frames = block["requested_size"], block["frames"]
        for action in ("free_requested", "free_completed"):
            self._note(action, address, size, frames)
        block |= {"state": "inactive", "requested_size": 0, "frames": []}

    def fail(self, size: int, device_free: int, frames: list[Any] | None = None) -> None:
        self._note("oom", device_free, size, frames)
        self.events[-1]["device_free"] = self.events[-1].pop("addr")

    def forget(self, first: int) -> None:
        """Drop the first events, as when the ring buffer overflows."""
        del self.events[:first]

    def snapshot(self) -> dict[str, Any]:
        self._note("snapshot", 0, 0, None)
        return {
            "segments": self.segments,
            "device_traces": [self.events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "expandable_segments": False,
                "roundup_power2_divisions": {"1": 0},
            },
            "external_annotations": [],
        }

    def _free_block(self, size: int) -> dict[str, Any] | None:
        blocks = (b for s in self.segments for b in s["blocks"])
        return next((b for b in blocks if b["state"] == "inactive" and b["size"] >= size), None)

    def _new_segment(self, size: int, frames: list[Any] | None) -> dict[str, Any]:
        total = -(-size // (2 * MB)) * 2 * MB
        block = {"address": self._next, "size": total}
        self.segments.append(
            {
                "device": 0,
                "address": self._next,
                "total_size": total,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": frames or [],
                "blocks": [block],
            }
        )
        self._note("segment_alloc", self._next, total, frames)
        self._next += total + 16 * MB
        return block

    def _note(self, action: str, address: int, size: int, frames: list[Any] | None) -> None:
        self._time += 10
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": self._time,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames or [],
            }
        )


def training() -> Device:
    """Weights of 3,000,000 bytes stay; three steps allocate 5,000,000 and 700 and free them."""
    device = Device()
    device.alloc(3_000_000, LOADING)
    for _ in range(3):
        activations = device.alloc(5_000_000, MODEL)
        small = device.alloc(700, IN_C)
        device.free(activations)
        device.free(small)
    return device


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path
