"""Embeddings: all models' tables are one, and each model's words are shifted to its own part."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix.fuse.rules.registry import front_of, rule_for
from stepscope.fix.fuse.stacked import Stacked


@rule_for("embedding")
def embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, Stacked) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    count, (words, width) = weight.count, weight.shape
    ids = front_of(input, count)
    _check_range(ids, words)
    shift = torch.arange(0, count * words, words, device=ids.device)
    table = weight.front().reshape(count * words, width)
    rows = functional.embedding(ids + shift.reshape(-1, *(1,) * (ids.dim() - 1)), table)
    if padding_idx is not None:
        # The padding's row gets no gradient; one index for all would shield one model's alone.
        is_padding = (ids == padding_idx % words).unsqueeze(-1)
        rows = torch.where(is_padding, rows.detach(), rows)
    return Stacked(rows, count)


def _check_range(ids: torch.Tensor, words: int) -> None:
    """A word beyond a model's own table would be the next model's. A GPU is not waited for."""
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or not ids.numel():
        return
    least, most = (int(one) for one in ids.aminmax())
    if least < 0 or most >= words:
        wrong = least if least < 0 else most
        raise UsageError(f"an embedding of {words} rows is asked for row {wrong}")
