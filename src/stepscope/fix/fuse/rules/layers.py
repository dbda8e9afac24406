"""Norms, pools, embeddings, dropout and losses, for all models at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix.fuse.random_streams import streams
from stepscope.fix.fuse.rules.registry import count_of, front_of, is_tensor, rule_for
from stepscope.fix.fuse.stacked import NotFusableError, Stacked

# Norms: each model has its own channels or rows, so nothing is averaged over models.


def _flat(value: Any, count: int) -> torch.Tensor | None:
    """All models' channels in a row; a view, so that running statistics are updated in place."""
    if value is None:
        return None
    return front_of(value, count).reshape(-1)


@rule_for("batch_norm", "instance_norm")
def batch_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    stacked = next((one for one in (weight, running_mean, input) if isinstance(one, Stacked)), None)
    if stacked is None or input.dim() < 2:
        return NotImplemented
    count = stacked.count
    if not isinstance(input, Stacked):
        input = Stacked(front_of(input, count), count)
    channels = [_flat(one, count) for one in (running_mean, running_var, weight, bias)]
    if func.__name__ == "batch_norm" and input.order == "front" and input.dim() > 2:
        wide = input.front().transpose(1, 2)
        if wide.is_contiguous():  # as products leave it: the batch may as well be the rest
            made = func(wide.reshape(1, count * wide.shape[1], -1), *channels, *args, **kwargs)
            return Stacked(made.reshape(wide.shape).transpose(1, 2), count)
    return Stacked(func(input.channels(), *channels, *args, **kwargs), count, "channel")


@rule_for("group_norm")
def group_norm(
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    count = input.count
    made = func(input.channels(), num_groups * count, _flat(weight, count), _flat(bias, count), eps)
    return Stacked(made, count, "channel")


@rule_for("layer_norm", "rms_norm")
def layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = None,
) -> Any:
    if not isinstance(input, Stacked):
        return NotImplemented
    shape = tuple(normalized_shape)
    if func.__name__ == "rms_norm":
        made = functional.rms_norm(input.front(), shape, None, bias if bias is not None else eps)
        bias = None
    else:
        made = functional.layer_norm(input.front(), shape, None, None, 1e-5 if eps is None else eps)
    ones = (1,) * (input.dim() - len(shape))
    for affine, apply in ((weight, torch.mul), (bias, torch.add)):
        if affine is not None:
            front = front_of(affine, input.count).reshape(-1, *ones, *shape)
            made = apply(made, front).to(made.dtype)  # under autocast weights are wider
    return Stacked(made, input.count)


@rule_for("prelu")
def prelu(func: Any, input: Any, weight: Any) -> Any:
    """Each model's own slopes: one, or one for each channel."""
    if not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    count, slopes = input.count, front_of(weight, input.count)
    pictures = input.channels()
    if slopes.shape[1] == 1:
        slopes = slopes.expand(count, input.shape[1])
    return Stacked(func(pictures, slopes.reshape(-1)), count, "channel")


# Pools: windows of pictures, whoever's channels they are.

_KINDS = ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool")
_NAMES = [f"{kind}{ndim}d" for kind in _KINDS for ndim in (1, 2, 3)]


@rule_for(*_NAMES)
def pool(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if input.dim() != int(func.__name__[-2]) + 2:
        return NotImplemented
    made = func(input.channels(), *args, **kwargs)
    if not is_tensor(made):  # with indices, which count inside one channel
        return tuple(Stacked(one, input.count, "channel") for one in made)
    return Stacked(made, input.count, "channel")


@rule_for("max_unpool1d", "max_unpool2d", "max_unpool3d")
def unpool(func: Any, input: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(indices, Stacked) or input.dim() != int(func.__name__[-2]) + 2:
        return NotImplemented
    made = func(input.channels(), indices.channels(), *args, **kwargs)
    return Stacked(made, input.count, "channel")


# Embeddings: all models' tables are one, and each model's words are shifted to its own part.


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


# Dropout: each model draws what it would draw alone, from a stream of its own.

_OUT_OF_PLACE = {"dropout_": torch.dropout, "feature_dropout_": torch.feature_dropout}


@rule_for("dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "feature_dropout")
def dropout(
    func: Any,
    input: Any,
    p: Any = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """`p` may differ from model to model: fuse() makes a PerModel of it."""
    shares = p.values if isinstance(p, PerModel) else (p,) * input.count
    if not training or not any(shares):
        return input
    if inplace or func.__name__.endswith("_"):
        input.separate()
        dropped = dropout(_OUT_OF_PLACE.get(func.__name__, func), input, p, training)
        input.physical, input.order = dropped.physical, dropped.order
        return input
    if streams().together:
        return _drop_together(func, input, shares)
    fronts = input.front()
    dropped = []
    for model, (one, share) in enumerate(zip(fronts.unbind(0), shares, strict=True)):
        with streams().of(model):
            # A GPU's kernel draws by place in memory, and alone the tensor has no gaps.
            own = one if one.is_contiguous() else one.clone()
            dropped.append(func(own, float(share), training))
    return Stacked(torch.stack(dropped), input.count)


def _drop_together(func: Any, input: Stacked, shares: tuple[Any, ...]) -> Stacked:
    """One kernel for all models: all elements are drawn alike, whoever's they are."""
    if any(share != shares[0] for share in shares):
        by_share = {share: func(input.front(), float(share), True) for share in set(shares)}
        parts = [by_share[share][model] for model, share in enumerate(shares)]
        return Stacked(torch.stack(parts), input.count)
    share = float(shares[0])
    if func.__name__ in ("dropout", "dropout_"):
        return Stacked(func(input.physical, share, True), input.count, input.order)
    if input.dim() < 3:
        return Stacked(func(input.front(), share, True), input.count)
    return Stacked(func(input.channels(), share, True), input.count, "channel")


class PerModel:
    """A setting of which each model has its own value."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"PerModel{self.values}"

    def __lt__(self, other: float) -> bool:
        return any(value < other for value in self.values)

    def __gt__(self, other: float) -> bool:
        return any(value > other for value in self.values)


class PerModelShare(PerModel, float):
    """One that torch takes for a number: the largest."""

    def __new__(cls, values: tuple[float, ...]) -> PerModelShare:
        return float.__new__(cls, max(values))


# Losses: one for each model, averaged over its own batch alone.


@rule_for("cross_entropy", "nll_loss")
def by_class(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    old = weight is not None or size_average is not None or reduce is not None
    if old or input.dim() < 2:
        return NotImplemented
    count = count_of(input, target)
    scores, wanted = front_of(input, count), front_of(target, count)
    smooth = {"label_smoothing": label_smoothing} if func.__name__ == "cross_entropy" else {}
    losses = func(
        scores.flatten(0, 1),
        wanted.flatten(0, 1),
        ignore_index=ignore_index,
        reduction="none",
        **smooth,
    ).unflatten(0, (count, -1))
    if reduction == "none":
        return Stacked(losses, count)
    total = losses.reshape(count, -1).sum(1)
    if reduction == "sum":
        return Stacked(total, count)
    if wanted.is_floating_point():  # shares of each class
        return Stacked(total / (losses[0].numel()), count)
    counted = (wanted != ignore_index).reshape(count, -1).sum(1)
    return Stacked(total / counted, count)


@rule_for(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "soft_margin_loss",
)  # fmt: skip
def by_element(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    reduction = kwargs.pop("reduction", "mean")
    old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
    if args or old or any(is_tensor(value) for value in kwargs.values()):
        return NotImplemented
    if input.shape != target.shape:
        return NotImplemented
    count = count_of(input, target)
    losses = func(front_of(input, count), front_of(target, count), reduction="none", **kwargs)
    if reduction == "none":
        return Stacked(losses, count)
    flat = losses.reshape(count, -1)
    if reduction == "batchmean":
        return Stacked(flat.sum(1) / input.shape[0], count)
    return Stacked(flat.mean(1) if reduction == "mean" else flat.sum(1), count)
