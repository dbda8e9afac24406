"""What to measure and for how long."""

from __future__ import annotations

from dataclasses import dataclass

PROGRESS = "stepscope-progress"  # starts a line on stderr: share done, what is being measured
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
MIN_BYTES = 1 << 10
MAX_BYTES = 256 << 20
QUICK_MAX_BYTES = 4 << 20
SECONDS = 20.0
QUICK_SECONDS = 1.0
LABORATORY_MAX_BYTES = 16 << 20
LABORATORY_QUICK_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """One calibration; equal on every rank."""

    backend: str | None = None  # None: gloo on the CPU, nccl on CUDA
    max_bytes: int | None = None
    seconds: float | None = None  # for each kind in each group
    quick: bool = False
    kinds: tuple[str, ...] = KINDS
    seed: int = 0
    algorithms: bool = False  # measure algorithms of collectives instead of everything else
    sizes_bytes: tuple[int, ...] = ()  # of the algorithms; none: powers of four

    @property
    def largest_bytes(self) -> int:
        if self.algorithms:
            default = LABORATORY_QUICK_MAX_BYTES if self.quick else LABORATORY_MAX_BYTES
        else:
            default = QUICK_MAX_BYTES if self.quick else MAX_BYTES
        return self.max_bytes or default

    @property
    def budget_ns(self) -> int:
        return round((self.seconds or (QUICK_SECONDS if self.quick else SECONDS)) * 1e9)

    def sizes(self) -> list[int]:
        """Powers of two from 1 KB; every second one when quick, and of the algorithms."""
        if self.sizes_bytes:
            return sorted(set(self.sizes_bytes))
        step = 2 if self.quick or self.algorithms else 1
        top = max(self.largest_bytes, MIN_BYTES).bit_length() - 1
        return [1 << power for power in range(MIN_BYTES.bit_length() - 1, top + 1, step)]

    def arguments(self) -> list[str]:
        """The same settings for `python -m stepscope.measure.calibrate`."""
        words = ["--seed", str(self.seed)]
        words += [word for kind in self.kinds for word in ("--kind", kind)]
        words += [word for size in self.sizes_bytes for word in ("--size", str(size))]
        if self.quick:
            words.append("--quick")
        if self.algorithms:
            words.append("--algorithms")
        for name in ("backend", "max_bytes", "seconds"):
            if (value := getattr(self, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words
