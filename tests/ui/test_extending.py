"""The examples of docs/how-to/own-whatifs.md, run as they are printed there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benches import bench_for
from stepscope import changes
from stepscope.errors import UsageError
from stepscope.predict.whatifs import parse_setting
from stepscope.trace.read import read_trace

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests/golden/h200-resnet18/rank-00000/trace.json.gz"
FIRST, SECOND = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/how-to/own-whatifs.md").read_text(), re.DOTALL
)


def test_a_graph_can_be_changed_without_a_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    done: dict[str, Any] = {}
    exec(FIRST.replace("trace.json.gz", str(TRACE)), done)
    before, after = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    context, chosen = done["context"], done["chosen"]
    gone = context.graph.tasks.dur_ns[chosen.tasks].sum() / 1e6
    assert gone > 1.0
    # The device decides this step: what it no longer runs is what the step gets shorter.
    assert before - after == pytest.approx(gone, rel=0.1)


def test_a_what_if_of_ones_own_works_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {}
    exec(SECOND, own)
    for listed in (changes.CHANGES, changes.PREDICTED):
        monkeypatch.setitem(listed, "faster", None)  # so that it is taken from the list again
        del listed["faster"]
    changes.register(own["FASTER"])
    bench = bench_for(read_trace(TRACE))
    before = bench.predict([])
    after = bench.predict([parse_setting("faster=conv|cudnn|xmma|cutlass:2")])
    assert after.predicted_ms < 0.9 * before.predicted_ms
    assert after.assumptions[0].endswith("tasks 2 times as fast")
    both = bench.predict(
        [parse_setting("faster=conv|cudnn|xmma|cutlass:2"), parse_setting("precision=bf16")]
    )
    assert both.refused == ()
    assert bench.predict([parse_setting("faster=nothing-like-it:2")]).refused
    with pytest.raises(UsageError, match="write REGEX:FACTOR"):
        bench.predict([parse_setting("faster=conv")])
