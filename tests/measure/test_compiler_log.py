"""What torch.compile did is kept, and nothing about it changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.explain.explain_job import explain_job
from stepscope.measure.compiler_log import CompilerLog
from stepscope.records.source_lines import Place
from stepscope.trace.run_folder.compiler_record import COMPILER, read_compiler_record

HERE = Path(__file__).name


def line_of(words: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


class Broken(torch.nn.Module):
    """A break, and a guard on a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1

    def forward(self, x: Any) -> Any:
        x = x.relu() * self.scale
        torch._dynamo.graph_break()  # planted
        return x + 1


def test_breaks_and_recompiles_are_read_from_dynamo(tmp_path: Path) -> None:
    log = CompilerLog()
    model = Broken()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    try:
        for scale, length in ((1, 3), (2, 3), (2, 5)):
            model.scale = scale
            compiled(torch.ones(length))
            log.look()  # as capture does when a compilation ends: a reset empties the lists
    finally:
        torch._dynamo.reset()
    log.write(tmp_path)
    log.write(tmp_path)  # nothing is written twice
    record, notes = read_compiler_record(tmp_path)
    assert notes == ()
    assert record is not None
    (planted,) = [one for one in record.breaks if one.place and one.place.file.endswith(HERE)]
    assert planted.place is not None
    assert planted.place.line == line_of("# planted")
    assert planted.times == 3
    assert "graph_break" in planted.reason
    here = [one for one in record.compilations if one.place and one.place.file.endswith(HERE)]
    guards = [one.guard or "" for one in here if one.again and one.function == "forward"]
    assert any("scale == 1" in guard for guard in guards)
    assert any("size mismatch at index 0" in guard for guard in guards)
    assert all(one.seconds is not None and one.seconds >= 0 for one in here)


def test_torchs_own_function_around_the_users_is_the_users_line(tmp_path: Path) -> None:
    """Of a container that is compiled itself, dynamo compiles a function of torch's."""
    torchs = "/x/site-packages/torch/_dynamo/external_utils.py"
    row = {
        "what": "compilation", "compile_id": "0/1", "co_name": "inner", "co_filename": torchs,
        "co_firstlineno": 67, "caller": ["/home/me/train.py", 9, "main"],
    }  # fmt: skip
    users = {**row, "co_name": "forward", "co_filename": "/home/me/torch/model.py"}
    unknown = {name: value for name, value in row.items() if name != "caller"}
    lines = "".join(json.dumps(line) + "\n" for line in (row, users, unknown))
    (tmp_path / COMPILER).write_text(lines)
    record, notes = read_compiler_record(tmp_path)
    assert notes == ()
    assert record is not None
    first, second, third = record.compilations
    assert first.place == Place(file="/home/me/train.py", line=9, function="main")
    assert first.function == "main"
    assert second.place == Place(file="/home/me/torch/model.py", line=67, function="forward")
    assert third.place is None


def test_who_compiles_is_the_innermost_frame_outside_torch() -> None:
    log = CompilerLog()
    log.begins("0/1")  # began
    ((file, line, function),) = log._callers.values()
    assert (Path(file).name, line) == (HERE, line_of("# began"))
    assert function == "test_who_compiles_is_the_innermost_frame_outside_torch"


def test_graphs_keep_their_text_and_their_key(tmp_path: Path) -> None:
    log = CompilerLog()
    graph = SimpleNamespace(
        _fx_graph_cache_key="fkey",
        fx_kwargs={"is_backward": True},
        device_types={"cuda"},
        disabled_cudagraphs_reason=None,
        cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=["mutated inputs (1 instances)"]),
        inductor_post_grad_graph_str='def forward(self, x: "f32[2][1]cpu"):\n'
        '    relu: "f32[2][1]cpu" = torch.ops.aten.relu.default(x)\n',
        source_code="",
    )
    log._add_graph(graph)
    log._add_graph(SimpleNamespace())  # a version of torch that keeps nothing
    log.write(tmp_path)
    record, notes = read_compiler_record(tmp_path)
    assert (notes, record is not None) == ((), True)
    assert record is not None
    (kept,) = record.graphs
    assert (kept.key, kept.backward, kept.devices) == ("fkey", True, ("cuda",))
    assert kept.not_graphed == "mutated inputs (1 instances)"
    assert [operator.name for operator in kept.operators] == ["aten::relu"]


def test_a_rank_without_a_trace_keeps_no_graphs(tmp_path: Path) -> None:
    log = CompilerLog()
    log._add_graph(SimpleNamespace(_fx_graph_cache_key="before"))
    log.of_rank(traced=False)
    log._add_graph(SimpleNamespace(_fx_graph_cache_key="after"))
    log.write(tmp_path)
    text = (tmp_path / COMPILER).read_text() if (tmp_path / COMPILER).exists() else ""
    assert '"graph"' not in text


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [
        json.dumps({"what": "graph", "key": "a", "operators": "no base64!"}),
        json.dumps({"what": "compilation", "compile_id": "0/0", "duration_us": -5}),
        "{half",
        json.dumps({"what": "break", "reason": None, "frames": [["a.py", 3, "f"]]}),
    ]
    (tmp_path / COMPILER).write_text("\n".join(lines) + "\n")
    record, notes = read_compiler_record(tmp_path)
    assert record is not None
    assert record.graphs[0].operators == ()
    assert record.compilations[0].seconds is None
    assert record.breaks[0].reason == "not known"
    assert notes
    assert read_compiler_record(tmp_path / "nowhere") == (None, ())


SCRIPT = """
    import torch
    from torch._dynamo.utils import counters
    from torch.nn.functional import gelu, mse_loss

    torch.manual_seed(0)
    seen = {}

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            x = gelu(self.layers[0](x))
            seen["norm"] = x.norm().item()  # break one
            x = gelu(self.layers[1](x))
            torch._dynamo.graph_break()  # break two
            x = gelu(self.layers[2](x))
            if x.mean() > 100:  # break three
                x = x / 100
            return self.layers[3](x)

    @torch.compile(backend="eager", dynamic=False)
    def prepare(x, settings):
        return x * settings["scale"]

    model = Net()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        prepare(torch.ones(3 if step < 4 else 5), {"scale": 1 if step < 3 else 2})
        x, y = torch.randn(32, 64), torch.randn(32, 64)
        loss = mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
    for kind in ("inductor", "aot_autograd", "stats", "frames"):
        print(kind, sorted(counters[kind].items()))
"""


def run(command: list[str], cache: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_planted_breaks_are_found_and_neither_bits_nor_caches_change(tmp_path: Path) -> None:
    """Twice each: with an empty cache, then with what the first run left there."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    out = [tmp_path / "cold", tmp_path / "warm"]
    python = [sys.executable, str(script)]
    ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out"]
    bare = [run(python, tmp_path / "bare-cache") for _ in out]
    captured = [run([*ours, str(folder), "--", *python], tmp_path / "cache") for folder in out]
    assert captured == bare
    lines = script.read_text().splitlines()
    planted = {number for number, line in enumerate(lines, 1) if "# break" in line}
    for folder in out:
        explanation = explain_job(folder, cache=False)
        rank = explanation.ranks[0]
        work = rank.compiled
        assert work is not None
        costs = {one.place.line: one.cost_ms for one in work.breaks if one.place}
        assert planted == {line for line, cost in costs.items() if cost}
        guards = [guard.guard for one in work.recompiled for guard in one.guards]
        assert any("scale" in guard for guard in guards)
        assert any("size mismatch" in guard for guard in guards)
        assert all(region.captured for region in work.regions)
        (finding,) = [one for one in rank.findings if one.id == "graph-breaks"]
        assert {place.line for place in finding.where} == planted
    cold, warm = (explain_job(folder, cache=False).ranks[0].compiled for folder in out)
    assert cold is not None
    assert warm is not None
    assert cold.cold_s
    assert warm.cached_s
