"""All encodings that hold a whole value, by the first word of their name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.saved.encoding_names import OFFLOAD
from stepscope.fix.saved.encodings.bits import encode_bits, encode_two_valued
from stepscope.fix.saved.encodings.four_bits import encode_four_bits
from stepscope.fix.saved.encodings.narrow import encode_narrow, narrow_spec
from stepscope.fix.saved.encodings.offload import encode_offload
from stepscope.fix.saved.encodings.pending_check import settle_waiting
from stepscope.fix.saved.encodings.reduced import encode_reduced
from stepscope.fix.saved.encodings.sparse import encode_sparse, sparse_spec
from stepscope.fix.saved.encodings.window import encode_window

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stepscope.fix.saved.encodings.encoded import Encoded

_BY_WORD: dict[str, Callable[[torch.Tensor, str], Encoded | None]] = {
    "bits": lambda tensor, _: encode_bits(tensor),
    "two-valued": lambda tensor, _: encode_two_valued(tensor),
    "window": encode_window,
    "sparse": lambda tensor, share: encode_sparse(tensor, float(share)),
    "narrow": encode_narrow,
    "bf16": lambda tensor, _: encode_reduced(tensor, "bf16"),
    "fp16": lambda tensor, _: encode_reduced(tensor, "fp16"),
    "fp8-e4m3": lambda tensor, _: encode_reduced(tensor, "fp8-e4m3"),
    "fp8-e5m2": lambda tensor, _: encode_reduced(tensor, "fp8-e5m2"),
    "4-bit": lambda tensor, _: encode_four_bits(tensor),
    OFFLOAD: encode_offload,
}


def encode_value(spec: str, tensor: torch.Tensor) -> Encoded | None:
    """Keep the whole value; None where this tensor does not allow it."""
    settle_waiting()
    word, _, rest = spec.partition(" ")
    return _BY_WORD[word](tensor, rest)


def exact_specs(tensor: torch.Tensor) -> list[str]:
    """Exact encodings that this tensor's content allows. Waits for the device."""
    return [spec for spec in (sparse_spec(tensor), narrow_spec(tensor)) if spec is not None]
