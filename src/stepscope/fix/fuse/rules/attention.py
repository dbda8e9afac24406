"""Attention: models and batch are one dimension; nothing is shared between models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from stepscope.fix.fuse.random_streams import streams
from stepscope.fix.fuse.rules.registry import count_of, front_of, rule_for
from stepscope.fix.fuse.stacked import Stacked


@rule_for("scaled_dot_product_attention")
def attend(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    if query.dim() < 3 or (dropout_p and not streams().together):
        return _each_attends(func, query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    count = count_of(query, key, value)
    fronts = [front_of(one, count).flatten(0, 1) for one in (query, key, value)]
    mask = _folded_mask(attn_mask, count, query)
    made = func(*fronts, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **kwargs)
    return Stacked(made.unflatten(0, (count, -1)), count)


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


def _each_attends(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Dropout inside the kernel draws from each model's own stream."""
    count = count_of(*args)
    results = []
    for model in range(count):
        own = [one.of(model) if isinstance(one, Stacked) else one for one in args]
        with streams().of(model):
            results.append(func(*own, **kwargs))
    return Stacked(torch.stack(results), count)


@rule_for("multi_head_attention_forward")
def multi_head(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Inputs are [length, batch, width], as nn.MultiheadAttention hands them over."""
    unusual = bias_k is not None or bias_v is not None or add_zero_attn or kwargs.get("static_k")
    if unusual or query.dim() != 3:
        return NotImplemented
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        weights = in_proj_weight.chunk(3, 0)
    biases = in_proj_bias.chunk(3, 0) if in_proj_bias is not None else (None,) * 3
    sides = (
        _heads(functional.linear(one, weight, bias), num_heads)
        for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    q, k, v = sides
    mask = _joined_mask(attn_mask, key_padding_mask, q)
    share = dropout_p if training else 0.0
    weights_used = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights_used = functional.softmax(scores if mask is None else scores + mask, -1)
        if share:
            weights_used = functional.dropout(weights_used, share)
        mixed = weights_used @ v
        if average_attn_weights:
            weights_used = weights_used.mean(1)
    else:
        causal = is_causal and mask is None
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, share, causal)
    length, batch = query.shape[:2]
    rows = mixed.permute(2, 0, 1, 3).reshape(length, batch, -1)
    return functional.linear(rows, out_proj_weight, out_proj_bias), weights_used


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
