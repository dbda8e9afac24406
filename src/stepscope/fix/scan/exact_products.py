"""Products of float32 without TF32, whatever the training has allowed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """TF32 loses 10^-3 of a product, and a chain multiplies thousands of them.

    Torch has an older and a newer way to allow TF32, and raises where it is asked by one after the
    other was used: what the training used is used here too.
    """
    products: Any = torch.backends.cuda.matmul
    if device.type != "cuda":
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        with _newer_way(products):
            yield
        return
    if before == "highest":
        yield
        return
    products.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32 = True
        if before == "medium":
            torch.set_float32_matmul_precision(before)


@contextmanager
def _newer_way(products: Any) -> Iterator[None]:
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before
