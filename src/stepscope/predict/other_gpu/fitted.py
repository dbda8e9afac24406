"""Numbers fitted to kernel times of other GPUs; benchmarks/fit_gpu_transfer.py writes them.

They are shares, exponents and spreads; no measured time is among them.
docs/records/gpus.md explains each.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a product that one block computes, and the share of the peak it reaches."""

    rows: int
    columns: int
    share: float


class ProductFit(msgspec.Struct, frozen=True, kw_only=True):
    """How matrix products of one kind use a GPU."""

    tiles: tuple[Tile, ...]
    wave: float  # 1: blocks run in whole waves; 0: the last wave costs only its own blocks
    inner: float  # what starting a block costs, as a length of the inner dimension
    split_share: float  # of the bandwidth, when the parts of a split product are added up
    overlap: float  # 1: arithmetic and memory add up; large: the longer one counts
    # Timed alone, kernels shorter than this end before a board that lacks watts lowers its clocks:
    # `calm_power` is the part of the slowing that the shortest have. 0: all alike.
    calm_ms: float = 0.0
    calm_power: float = 1.0
    aligned_power: float = 1.0  # PowerFit.aligned, where it counts
    # Timed alone, with so many copies of the matrices in turn: what of them fits the L2 cache moves
    # at the cache's rate. 0: nothing does.
    copies: int = 0
    start_cycles: float = 0.0


class CacheFit(msgspec.Struct, frozen=True, kw_only=True):
    rate_share: float  # of multiprocessors x clock x 64 bytes
    fits: float  # the share of the cache that one operator's tensors may fill and stay
    sharpness: float


class RowFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one block takes for its row: clock cycles, memory aside, and room in the cache."""

    start_cycles: float
    step_cycles: float  # each time that its threads take their next elements
    rereads_fit: float  # the share of the cache that rows being read again may fill


class AttentionFit(msgspec.Struct, frozen=True, kw_only=True):
    share: float  # of what products reach
    start_cycles: float
    calm_ms: float  # kernels shorter than this hardly run into the limit of watts


class PowerFit(msgspec.Struct, frozen=True, kw_only=True):
    """rate = unit x lanes x peak x min(1, (left / (peak x watts per TFLOP/s)) ^ exponent), where
    what is left for arithmetic is watts - board_watts."""

    exponent: float
    board_watts: float  # that a board draws at full clocks without work
    # Of the slowing that long fp32 products have, for sides that are multiples of 4, as those of
    # models are: their vector loads take fewer instructions, so fewer watts.
    aligned: float
    unit: dict[str, float]  # kind of unit -> share of its peak at full clocks
    wide_lanes: float  # share left where 128 fp32 lanes share four schedulers
    # Watts per TFLOP/s at full clocks, by generation and kind of unit.
    watts_per_tflop: dict[str, dict[str, float]]
    estimated: tuple[str, ...]  # "generation unit" that no measured GPU shows


class TransferFit(msgspec.Struct, frozen=True, kw_only=True):
    products: dict[str, ProductFit]
    cache: CacheFit
    rows: dict[str, RowFit]  # softmax and norm
    power: PowerFit
    # GPU -> "memory" or a dtype -> achieved share of the peak, where measured.
    measured: dict[str, dict[str, float]]
    attention: AttentionFit
    # By closeness of two GPUs: how much of a kernel's own deviation from the model is kept.
    kept: dict[str, dict[str, float]]  # family -> closeness -> share
    # The host's time inside times taken with events, in milliseconds by operator.
    launch_ms: dict[str, float]
    hidden_launch: float  # the share of it that runs before the kernel can start
    # By operator and closeness: standard deviation of the logarithm of a predicted time.
    spread: dict[str, dict[str, float]]
    # The part of it that all kernels of one family share.
    common: float
    estimated: float  # added for a rate that no GPU of the generation shows
    # First word of a link -> share of its rate that all-reduces reach, by ranks ("2", "8"), and
    # "start_us", what the shortest one takes.
    link: dict[str, dict[str, float]]


@cache
def transfer_fit() -> TransferFit:
    text = Path(__file__).with_name("fitted.json").read_bytes()
    return msgspec.json.decode(text, type=TransferFit)
