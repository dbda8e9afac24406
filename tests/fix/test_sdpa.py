"""sdpa: attention that is written out is found in the source, and replaced by the same."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.fix.proposal import Proposal, Script, edited
from stepscope.fix.remedies.attention import SDPA
from stepscope.records.script_facts import ScriptFacts

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn

mask = torch.ones(5, 5).tril()
"""
# Bodies of attend(self, q, k, v, mask).
BODIES = {
    "scaled": """\
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    weights = F.softmax(scores, dim=-1)
    return weights @ v
""",
    "masked as in nanoGPT": """\
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(mask[:5, :5] == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    att = self.attn_dropout(att)
    y = att @ v  # (B, nh, T, hs)
    return y
""",
    "mask if there is one": """\
    scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = scores.softmax(-1)
    weights = F.dropout(weights, p=0.0, training=self.training)
    out = torch.matmul(weights, v)
    return out.transpose(1, 2)
""",
    "mask added in place": """\
    kt = k.mT
    scores = torch.matmul(q * 0.5, kt)
    scores += (mask - 1) * 1e9
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)
""",
    "one expression": """\
    return torch.softmax(q.matmul(k.transpose(-1, -2)) / k.shape[-1] ** 0.5, dim=-1).matmul(v)
""",
}
# Bodies that look like attention, but are more or something else.
OTHERS = {
    "weights are returned": """\
    weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), dim=-1)
    return weights @ v, weights
""",
    "queries change meanwhile": """\
    weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), dim=-1)
    q = v
    return weights @ v + q
""",
}
NOT_ATTENTION = {
    "over another dimension": "    return F.softmax(q @ k.transpose(-2, -1), dim=1) @ v\n",
    "heads transposed": "    return F.softmax(q @ k.transpose(1, 2), dim=-1) @ v\n",
    "another function of scores": """\
    scores = q @ k.transpose(-2, -1)
    scores = torch.tanh(scores)
    return F.softmax(scores, dim=-1) @ v
""",
    "linear layer": "    return F.softmax(q @ k, dim=-1) @ v\n",
}


def _module(body: str) -> bytes:
    return f"{HEAD}\ndef attend(self, q, k, v, mask):\n{body}".encode()


def _propose(text: bytes) -> tuple[Proposal, str]:
    script = Script(ScriptFacts(sources=("model.py",)), lambda _file: text)
    proposal = SDPA.patch(script, "")
    changed = edited(proposal.edits, lambda _file: text).get("model.py", text)
    return proposal, changed.decode()


def _result(text: bytes | str) -> Any:
    import torch
    from torch import nn

    class Self(nn.Module):
        scale = 0.3

        def __init__(self) -> None:
            super().__init__()
            self.attn_dropout = nn.Dropout(0.2)

    names: dict[str, Any] = {}
    exec(text, names)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    return names["attend"](Self().eval(), q, k, v, names["mask"])


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_call_computes_the_same(body: str) -> None:
    import torch

    proposal, changed = _propose(_module(body))
    assert not proposal.by_hand
    assert changed.count("F.scaled_dot_product_attention(") == 1
    assert "softmax" not in changed
    torch.testing.assert_close(_result(changed), _result(_module(body)))


def test_dropout_and_mask_are_passed_on() -> None:
    _, changed = _propose(_module(BODIES["masked as in nanoGPT"]))
    assert changed.splitlines()[-2:] == [
        "    y = F.scaled_dot_product_attention(q, k, v, attn_mask=~(mask[:5, :5] == 0), "
        "dropout_p=self.attn_dropout.p if self.attn_dropout.training else 0.0, "
        "scale=1.0 / math.sqrt(k.size(-1)))  # (B, nh, T, hs)",
        "    return y",
    ]


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_attention_that_does_more_is_left_to_the_user(body: str) -> None:
    proposal, changed = _propose(_module(body))
    assert changed.encode() == _module(body)
    assert proposal.by_hand[0].startswith("model.py:")
    assert "scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(4))" in proposal.by_hand[0]


@pytest.mark.parametrize("body", NOT_ATTENTION.values(), ids=NOT_ATTENTION)
def test_what_is_no_attention_is_not_found(body: str) -> None:
    proposal, _ = _propose(_module(body))
    assert proposal == Proposal()


def test_it_is_only_proposed() -> None:
    assert SDPA.apply is None
    assert SDPA.fits(ScriptFacts(sources=("model.py",)), "") is None
    assert SDPA.fits(ScriptFacts(), "") == "no module is defined in the user's own files"
