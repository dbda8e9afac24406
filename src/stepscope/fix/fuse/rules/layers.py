"""Norms, pools, embeddings, dropout, losses and attention, for all models at once."""

from __future__ import annotations

import math
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix.fuse.random_streams import streams
from stepscope.fix.fuse.rules.registry import count_of, front_of, is_tensor, rest_of, rule_for
from stepscope.fix.fuse.stacked import NotFusableError, Stacked, of_model

# Norms: each model has its own channels or rows, so nothing is averaged over models.


def _flat(value: Any, count: int) -> torch.Tensor | None:
    """All models' channels in a row; a view, so that running statistics are updated in place."""
    if value is None:
        return None
    return front_of(value, count).reshape(-1)


@rule_for("batch_norm", "instance_norm")
def batch_norm(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("running_mean", "running_var", "weight", "bias")
    parts = [*args[:4], *(kwargs.pop(name, None) for name in names[len(args) :])]
    mean, _, weight, _ = parts
    stacked = next((one for one in (weight, mean, input) if isinstance(one, Stacked)), None)
    if stacked is None or input.dim() < 2:
        return NotImplemented
    count = stacked.count
    if not isinstance(input, Stacked):
        input = Stacked(front_of(input, count), count)
    settings = [*(_flat(one, count) for one in parts), *args[4:]]
    if func.__name__ == "batch_norm" and input.order == "front" and input.dim() > 2:
        wide = input.front().transpose(1, 2)
        if wide.is_contiguous():  # as products leave it: the batch may as well be the rest
            made = func(wide.reshape(1, count * wide.shape[1], -1), *settings, **kwargs)
            return Stacked(made.reshape(wide.shape).transpose(1, 2), count)
    return Stacked(func(input.channels(), *settings, **kwargs), count, "channel")


@rule_for("group_norm")
def group_norm(func: Any, input: Any, num_groups: int, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    weight, bias, eps = rest_of(args, kwargs, weight=None, bias=None, eps=1e-5)
    count = input.count
    made = func(input.channels(), num_groups * count, _flat(weight, count), _flat(bias, count), eps)
    return Stacked(made, count, "channel")


@rule_for("layer_norm", "rms_norm")
def layer_norm(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Stacked):
        return NotImplemented
    weight, bias, eps = rest_of(args, kwargs, weight=None, bias=None, eps=None)
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
def embedding(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    padding_idx, max_norm, _, by_frequency, sparse = rest_of(
        args, kwargs, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
        sparse=False,
    )  # fmt: skip
    _check_table(weight, sparse, max_norm)
    if not isinstance(weight, Stacked) or sparse:
        return NotImplemented
    count = weight.count
    ids = front_of(input, count)
    table = weight.front().flatten(0, 1)
    rows = functional.embedding(_shifted(ids, weight), table, scale_grad_by_freq=by_frequency)
    padding = _Padding.of(padding_idx, weight)
    if padding is not None:
        # The padding's row gets no gradient; one index for all would shield one model's alone.
        rows = torch.where(padding.among(ids).unsqueeze(-1), rows.detach(), rows)
    return Stacked(rows, count)


@rule_for("embedding_bag")
def embedding_bag(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """The bags of all models, one after the other."""
    offsets, max_norm, _, by_frequency, mode, sparse, weights, has_end, padding_idx = rest_of(
        args, kwargs, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False,
        mode="mean", sparse=False, per_sample_weights=None, include_last_offset=False,
        padding_idx=None,
    )  # fmt: skip
    _check_table(weight, sparse, max_norm)
    # torch scales a bag's gradient by the frequency of another word on a CPU: each as it is alone.
    if not isinstance(weight, Stacked) or sparse or input.is_nested or by_frequency:
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
        begins = begins[:, :-1] if has_end else begins
        if begins.device.type == "cpu" and bool(begins[:, 0].any()):
            return NotImplemented  # torch says what is wrong
        begins = (begins.to(ids.dtype) + _steps(count, ids.shape[1], ids)[:, None]).flatten()
    bags = func(
        shifted.flatten(0, 1),
        weight.front().flatten(0, 1),
        begins,
        mode=mode,
        per_sample_weights=None if weights is None else front_of(weights, count).flatten(0, 1),
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


def _shifted(ids: torch.Tensor, weight: Stacked) -> torch.Tensor:
    """The rows of the one table."""
    words = weight.shape[0]
    # A word beyond a model's own table would be the next model's. A GPU is not waited for.
    if type(ids) is torch.Tensor and ids.device.type == "cpu" and ids.numel():
        least, most = (int(one) for one in ids.aminmax())
        if least < 0 or most >= words:
            wrong = least if least < 0 else most
            raise UsageError(f"an embedding of {words} rows was asked for row {wrong}")
    return ids + _steps(weight.count, words, ids).reshape(-1, *(1,) * (ids.dim() - 1))


def _steps(count: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """0, size, 2 * size, ..."""
    if not size:
        return like.new_zeros(count)
    return torch.arange(0, count * size, size, device=like.device)


def _check_table(weight: Any, sparse: bool, max_norm: float | None) -> None:
    if sparse and torch.is_grad_enabled() and weight.requires_grad:
        raise UsageError(
            "an embedding's sparse gradients cannot be stacked. Build it with sparse=False"
        )
    if max_norm is not None:
        raise NotFusableError("max_norm shortens each model's own rows")


# Dropout: each model draws what it would draw alone, from a stream of its own.

_OUT_OF_PLACE = {"dropout_": torch.dropout, "feature_dropout_": torch.feature_dropout}


@rule_for("dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "feature_dropout")
def dropout(
    func: Any, input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False
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
    parts = []
    for model, (one, share) in enumerate(zip(input.front().unbind(0), shares, strict=True)):
        with streams().of(model):
            # A GPU's kernel draws by place in memory, and alone the tensor has no gaps.
            own = one if one.is_contiguous() else one.clone()
            parts.append(func(own, float(share), training))
    return Stacked(torch.stack(parts), input.count)


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
def by_class(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    weight, size_average, ignore_index, reduce, reduction, label_smoothing = rest_of(
        args, kwargs, weight=None, size_average=None, ignore_index=-100, reduce=None,
        reduction="mean", label_smoothing=0.0,
    )  # fmt: skip
    old = weight is not None or size_average is not None or reduce is not None
    if old or input.dim() < 2:
        return NotImplemented
    count = count_of(input, target)
    scores, wanted = front_of(input, count), front_of(target, count)
    smooth = {"label_smoothing": label_smoothing} if func.__name__ == "cross_entropy" else {}
    settings = {"ignore_index": ignore_index, "reduction": "none", **smooth}
    losses = func(scores.flatten(0, 1), wanted.flatten(0, 1), **settings).unflatten(0, (count, -1))
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


# Attention: models and batch are one dimension; nothing is shared between models.


@rule_for("scaled_dot_product_attention")
def attend(func: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("attn_mask", "dropout_p", "is_causal")
    settings = {**dict(zip(names, args, strict=False)), **kwargs}
    count = count_of(query, key, value)
    if query.dim() < 3 or (settings.get("dropout_p") and not streams().together):
        # Dropout inside the kernel draws from each model's own stream.
        results = []
        for model in range(count):
            inputs = [of_model(model, one) for one in (query, key, value)]
            own = {name: of_model(model, one) for name, one in settings.items()}
            with streams().of(model):
                results.append(func(*inputs, **own))
        return Stacked(torch.stack(results), count)
    fronts = [front_of(one, count).flatten(0, 1) for one in (query, key, value)]
    settings["attn_mask"] = _folded_mask(settings.get("attn_mask"), count, query)
    return Stacked(func(*fronts, **settings).unflatten(0, (count, -1)), count)


def _folded_mask(mask: Any, count: int, query: torch.Tensor) -> torch.Tensor | None:
    """With models and batch in one dimension, unless it is the same for all of both."""
    if isinstance(mask, Stacked) and mask.common is not None:
        mask = mask.common
    if mask is None or (not isinstance(mask, Stacked) and mask.dim() < query.dim()):
        folded: torch.Tensor | None = mask
        return folded
    front = front_of(mask, count)
    front = front.reshape(count, *(1,) * (query.dim() - mask.dim()), *mask.shape)
    return front.expand(count, query.shape[0], *front.shape[2:]).flatten(0, 1)


@rule_for("multi_head_attention_forward")
def multi_head(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Inputs are [length, batch, width], as nn.MultiheadAttention hands them over."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    unusual = call.bias_k is not None or call.bias_v is not None or call.add_zero_attn
    if unusual or call.static_k is not None or call.query.dim() != 3:
        return NotImplemented
    if call.use_separate_proj_weight:
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    else:
        weights = call.in_proj_weight.chunk(3, 0)
    no_bias = call.in_proj_bias is None
    biases = (None,) * 3 if no_bias else call.in_proj_bias.chunk(3, 0)
    q, k, v = (
        _heads(functional.linear(one, weight, bias), call.num_heads)
        for one, weight, bias in zip(
            (call.query, call.key, call.value), weights, biases, strict=True
        )
    )
    mask = _joined_mask(call.attn_mask, call.key_padding_mask, q)
    share = call.dropout_p if call.training else 0.0
    weights_used = None
    if call.need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights_used = functional.softmax(scores if mask is None else scores + mask, -1)
        if share:
            weights_used = functional.dropout(weights_used, share)
        mixed = weights_used @ v
        if call.average_attn_weights:
            weights_used = weights_used.mean(1)
    else:
        causal = call.is_causal and mask is None
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, share, causal)
    length, batch = call.query.shape[:2]
    rows = mixed.permute(2, 0, 1, 3).reshape(length, batch, -1)
    return functional.linear(rows, call.out_proj_weight, call.out_proj_bias), weights_used


def _heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[length, batch, width] -> [batch, heads, length, width / heads]."""
    length, batch, _ = rows.shape
    return rows.reshape(length, batch, heads, -1).permute(1, 2, 0, 3)


def _joined_mask(mask: Any, padding: Any, q: torch.Tensor) -> Any:
    """Added to the scores; boolean masks forbid where they are true."""
    total = None
    if mask is not None:
        total = _added(mask, q)
        if total.dim() == 3:  # [batch * heads, from, to]
            total = total.reshape(q.shape[0], -1, *total.shape[1:])
    if padding is not None:
        wide = _added(padding, q)
        wide = wide.reshape(wide.shape[0], 1, 1, wide.shape[1])
        total = wide if total is None else total + wide
    return total


def _added(mask: Any, q: torch.Tensor) -> Any:
    if mask.dtype != torch.bool:
        return mask
    nothing = torch.zeros((), dtype=q.dtype, device=q.device)
    return torch.where(mask, nothing - math.inf, nothing)
