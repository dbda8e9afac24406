"""Packed sequences: the models' own dimension goes along as one more width of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from stepscope.fix.fuse.ledger import note
from stepscope.fix.fuse.rules.registry import rule_for
from stepscope.fix.fuse.stacked import NotFusableError, Stacked


def agreed_sizes(sizes: Any) -> tuple[int, ...]:
    """Lengths, or how many sequences take part in each step, where all models have the same."""
    if not isinstance(sizes, Stacked):
        return tuple(sizes.tolist())
    if sizes.common is None:
        every = sizes.front()
        if not torch.equal(every, every[:1].expand_as(every)):
            raise NotFusableError("lengths of packed sequences differ from model to model")
        note("lengths", "agreed")
    return tuple(sizes.of(0).tolist())


@rule_for("_pack_padded_sequence")
def pack(func: Any, x: Any, lengths: Any, batch_first: bool) -> Any:
    common = torch.tensor(agreed_sizes(lengths))
    if not isinstance(x, Stacked):
        return func(x, common, batch_first)
    data, sizes = func(x.front().movedim(0, 2), common, batch_first)
    return Stacked(data.transpose(0, 1), x.count), Stacked.share(sizes, x.count)


@rule_for("_pad_packed_sequence")
def pad(
    func: Any, data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    common = torch.tensor(agreed_sizes(sizes))
    if not isinstance(data, Stacked):
        return func(data, common, batch_first, padding_value, total_length)
    rows = data.front().transpose(0, 1)
    padded, lengths = func(rows, common, batch_first, padding_value, total_length)
    return Stacked(padded.movedim(2, 0), data.count), Stacked.share(lengths, data.count)


def _parts(packed: PackedSequence) -> tuple[list[Any], None]:
    return list(packed), None


def _put_together(parts: Any, _: None) -> PackedSequence:
    return PackedSequence(*parts)


if PackedSequence not in _pytree.SUPPORTED_NODES:  # else it would be one value without tensors
    _pytree.register_pytree_node(PackedSequence, _parts, _put_together)
