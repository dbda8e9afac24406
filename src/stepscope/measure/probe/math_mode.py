"""torch's switches for products in fp32, as a mode asks for them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from stepscope.records.probe_modes import precision_of, tries_algorithms

if TYPE_CHECKING:
    from collections.abc import Iterator

# Whether matrix products and cuDNN's operators may use tf32; other modes have torch's defaults.
_TF32 = {"tf32": (True, True), "fp32": (False, False)}
_DEFAULTS = (False, True)


@contextlib.contextmanager
def math_mode(mode: str) -> Iterator[None]:
    """Set them for a while."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32 = _TF32.get(precision_of(mode), _DEFAULTS)
    cudnn.benchmark = tries_algorithms(mode)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
