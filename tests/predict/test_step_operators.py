"""Every operator of real traces can be called again, whatever launched it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.predict.autocast import traced_mode
from stepscope.predict.step_operators import find_step_operators
from stepscope.ui.advice import open_slowest

TRACES = Path(__file__).parents[3] / "shared/traces/h200"
pytestmark = pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not here")


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpt2s_b8_bf16_ckpt", "bf16"), ("gpt2s_b8_tf32", "tf32"), ("mlp_b32_fp32_loop", "")],
)
def test_all_device_time_belongs_to_calls(name: str, mode: str) -> None:
    context = open_slowest(str(TRACES / f"{name}.json.gz"), cache=False)[0].context
    operators = find_step_operators(context)
    owned_ns = operators.item_ns[operators.owner >= 0].sum()
    assert owned_ns > 0.97 * operators.item_ns.sum()
    assert traced_mode(context) == mode


def test_an_optimizer_s_lists_are_the_parameters() -> None:
    path = TRACES / "mlp_b32_fp32_fused.json.gz"
    context = open_slowest(str(path), cache=False)[0].context
    (update,) = {
        call.name: call for call in find_step_operators(context).calls if "_fused_" in call.name
    }.values()
    assert context.parameters is not None
    assert len(update.shapes[0]) == context.parameters.tensors
    assert not update.in_forward
