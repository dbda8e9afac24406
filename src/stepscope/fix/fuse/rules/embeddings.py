"""Embeddings: all models' tables are one, and each model's words are shifted to its own part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix.fuse.rules.dropout import PerModel
from stepscope.fix.fuse.rules.registry import front_of, rule_for
from stepscope.fix.fuse.stacked import NotFusableError, Stacked


@rule_for("embedding")
def embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    _refuse_sparse(weight, sparse)
    if max_norm is not None:
        raise NotFusableError("max_norm shortens each model's own rows")
    if not isinstance(weight, Stacked) or sparse:
        return NotImplemented
    count = weight.count
    ids, table = front_of(input, count), _one_table(weight)
    shifted = _shifted(ids, weight)
    rows = functional.embedding(shifted, table, scale_grad_by_freq=scale_grad_by_freq)
    padding = _Padding.of(padding_idx, weight)
    if padding is not None:
        # The padding's row gets no gradient; one index for all would shield one model's alone.
        rows = torch.where(padding.among(ids).unsqueeze(-1), rows.detach(), rows)
    return Stacked(rows, count)


@rule_for("embedding_bag")
def embedding_bag(
    func: Any,
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Any:
    """The bags of all models, one after the other."""
    _refuse_sparse(weight, sparse)
    if max_norm is not None:
        raise NotFusableError("max_norm shortens each model's own rows")
    unusual = sparse or input.is_nested
    # torch scales a bag's gradient by the frequency of another word on a CPU: each as it is alone.
    if not isinstance(weight, Stacked) or unusual or scale_grad_by_freq:
        return NotImplemented
    count = weight.count
    ids = front_of(input, count)
    shifted = _shifted(ids, weight)
    padding = _Padding.of(padding_idx, weight)
    if padding is not None:  # padding counts for nothing, so that all models can share one row
        shifted = torch.where(padding.among(ids), padding.shared_row, shifted)
    begins = None
    if offsets is not None:
        begins = front_of(offsets, count)
        begins = begins[:, :-1] if include_last_offset else begins
        if begins.device.type == "cpu" and bool(begins[:, 0].any()):
            return NotImplemented  # torch says what is wrong
        begins = (begins.to(ids.dtype) + _steps(count, ids.shape[1], ids)[:, None]).flatten()
    shares = None if per_sample_weights is None else front_of(per_sample_weights, count)
    bags = func(
        shifted.flatten(0, 1),
        _one_table(weight),
        begins,
        mode=mode,
        per_sample_weights=None if shares is None else shares.flatten(0, 1),
        padding_idx=None if padding is None else padding.shared_row,
    )
    return Stacked(bags.unflatten(0, (count, -1)), count)


class _Padding(NamedTuple):
    """Which rows of the models' tables are padding."""

    ids: tuple[int, ...]  # in each model's own table; -1 where it has none
    words: int

    @classmethod
    def of(cls, padding_idx: Any, weight: Stacked) -> _Padding | None:
        own = padding_idx.values if isinstance(padding_idx, PerModel) else (padding_idx,)
        if all(one is None for one in own):
            return None
        words = weight.shape[0]
        every = own if isinstance(padding_idx, PerModel) else own * weight.count
        return cls(tuple(-1 if one is None else one % words for one in every), words)

    @property
    def shared_row(self) -> int:
        """One model's padding in the table of all."""
        model = next(model for model, own in enumerate(self.ids) if own >= 0)
        return model * self.words + self.ids[model]

    def among(self, ids: torch.Tensor) -> torch.Tensor:
        if len(set(self.ids)) == 1:
            return ids == self.ids[0]
        # Filled on the device: a CUDA graph can hold no copy from the host.
        own = torch.stack([torch.full((), one, device=ids.device) for one in self.ids])
        return ids == own.reshape(-1, *(1,) * (ids.dim() - 1))


def _one_table(weight: Stacked) -> torch.Tensor:
    return weight.front().flatten(0, 1)


def _shifted(ids: torch.Tensor, weight: Stacked) -> torch.Tensor:
    """The rows of the one table."""
    words = weight.shape[0]
    _check_range(ids, words)
    return ids + _steps(weight.count, words, ids).reshape(-1, *(1,) * (ids.dim() - 1))


def _steps(count: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """0, size, 2 * size, ..."""
    return (
        torch.arange(0, count * size, size, device=like.device) if size else like.new_zeros(count)
    )


def _refuse_sparse(weight: Any, sparse: bool) -> None:
    if sparse and torch.is_grad_enabled() and weight.requires_grad:
        raise UsageError(
            "an embedding's sparse gradients cannot be stacked. Build it with sparse=False"
        )


def _check_range(ids: torch.Tensor, words: int) -> None:
    """A word beyond a model's own table would be the next model's. A GPU is not waited for."""
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or not ids.numel():
        return
    least, most = (int(one) for one in ids.aminmax())
    if least < 0 or most >= words:
        wrong = least if least < 0 else most
        raise UsageError(f"an embedding of {words} rows was asked for row {wrong}")
