"""Peak memory of changed steps: a graph worked out by hand, and real models on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from backward_graphs import FLOAT, graph_of

from stepscope.predict.peak_memory.backward_graph import (
    AutocastRule,
    MemoryChange,
    autocast_rules,
    autocast_widths,
    block_of_nodes,
    find_block_paths,
    hold,
    rule_of,
)
from stepscope.predict.peak_memory.passes import GraphLevels, replay_backward
from stepscope.predict.peak_memory.peak import changed_peak, later_peak
from stepscope.records.memory import (
    BatchLine,
    CapturedBackward,
    CapturedMemory,
    CapturedPeak,
    CapturedPhase,
    GraphModule,
    LargestBatch,
    Memory,
)

# x [10] -> norm (weight of 10) -> linear (weight of 200, result [20]) -> relu -> sum; the batch x
# needs no gradient.
GRAPH = graph_of(
    [
            ["NativeLayerNormBackward0", 0, [[10, FLOAT]], [[-1, 0], [4, 0]],
             [["input", 0, 10, FLOAT]]],
            ["MmBackward0", 0, [[20, FLOAT]], [[0, 0], [5, 0]],
             [["self", 1, 10, FLOAT], ["mat2", 2, 200, FLOAT]]],
            ["ReluBackward0", 0, [[20, FLOAT]], [[1, 0]], [["result", 3, 20, FLOAT]]],
            ["SumBackward0", 0, [[1, FLOAT]], [[2, 0]], []],
            ["AccumulateGrad", -1, [[10, FLOAT]], [], []],
            ["AccumulateGrad", -1, [[200, FLOAT]], [], []],
        ],
    [[40, "input"], [40, "activation"], [800, "state"], [80, "activation"]],
)  # fmt: skip


def levels(device: str = "cuda", **change: Any) -> tuple[float, float, float]:
    held = hold(GRAPH, device, MemoryChange(**change))
    result = replay_backward(held, keeps_gradients=False)
    return result.kept_bytes, result.peak_bytes, result.gradients_bytes


def test_in_fp32_by_hand() -> None:
    # Kept: the norm's result (40) and relu's (80). Highest in the product's backward: the gradient
    # of its result (80), of the norm's result (40) and of the weight (800), while 40 are kept.
    assert levels() == (120, 40 + 80 + 40 + 800, 840)


def test_under_autocast_by_hand() -> None:
    # The norm stays in fp32, so the product keeps a narrow copy of 20 and the cast weight of 400;
    # relu's result is narrow: 40. In the product's backward: 20 + 400 kept, the gradient of its
    # result 40, gradients in bf16 20 and 400. Then the weight's is cast: 400 + 800, and the input's
    # 20 + 40, one after the other.
    kept, peak, gradients = levels(autocast=True)
    assert kept == 20 + 400 + 40
    assert gradients == 840
    assert peak == 40 + 400 + 800  # the input's gradient in fp32, the weight's before and after


def test_twice_the_batch_leaves_weights_as_they_are() -> None:
    assert levels(batch=2.0) == (240, 80 + 160 + 80 + 800, 840)


# A product with a frozen weight; its result [20] times weights [2] that are broadcast; a sum.
BROADCAST = graph_of(
    [
            ["MmBackward0", 0, [[20, FLOAT]], [[-1, 0]], [["self", 0, 10, FLOAT]]],
            ["MulBackward0", 0, [[20, FLOAT]], [[0, 0], [3, 0]],
             [["self", 1, 20, FLOAT], ["other", 2, 2, FLOAT]]],
            ["SumBackward0", 0, [[1, FLOAT]], [[1, 0]], []],
            ["AccumulateGrad", -1, [[2, FLOAT]], [], []],
        ],
    [[40, "input"], [80, "activation"], [8, "state"]],
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "copies"), [("bf16", 2), ("fp16", 0)])
def test_products_in_bf16_cast_what_a_recurrent_layer_gives_in_fp16(
    dtype: str, copies: int
) -> None:
    """cuDNN's layer gives [20]; through a dropout two products read it, each with its own copy; a
    second layer takes it as it is."""
    nodes = [
        ["CudnnRnnBackward0", 0, [[20, FLOAT]], [[-1, 0]], [["result0", 0, 20, FLOAT]]],
        ["NativeDropoutBackward0", 0, [[20, FLOAT]], [[0, 0]], [["result1", 1, 20, "bool"]]],
        ["BmmBackward0", 0, [[4, FLOAT]], [[1, 0], [-1, 0]], [["self", 2, 20, FLOAT]]],
        ["BmmBackward0", 0, [[4, FLOAT]], [[1, 0], [-1, 0]], [["self", 2, 20, FLOAT]]],
        ["CudnnRnnBackward0", 0, [[20, FLOAT]], [[1, 0]], [["input", 2, 20, FLOAT]]],
    ]
    storages = [[80, "activation"], [20, "activation"], [80, "activation"]]
    change = MemoryChange(autocast=True, autocast_dtype=dtype)
    held = hold(graph_of(nodes, storages), "cuda", change)
    assert sum(value.is_copy for value in held.values) == copies
    # The layer's result, dropout's mask, dropout's result; copies are as narrow.
    assert held.kept_bytes == 40 + 20 + 40 + 40 * copies


# x [10] -> linear [20] -> the largest of all, or of each row by its index.
def largest_of(name: str, saved: list[Any]) -> CapturedBackward:
    nodes = [
        ["MmBackward0", 0, [[20, FLOAT]], [[-1, 0]], [["self", 0, 10, FLOAT]]],
        [name, 0, [[2, FLOAT]], [[0, 0]], saved],
        ["SumBackward0", 0, [[1, FLOAT]], [[1, 0]], []],
    ]
    storages = [[40, "input"], [80, "activation"], [8, "activation"]]
    return graph_of(nodes, storages)


AMAX = [["result", 2, 2, FLOAT], ["self", 1, 20, FLOAT]]


@pytest.mark.parametrize("name", ["AmaxBackward0", "AminBackward0", "MaxBackward1"])
def test_the_gradient_of_a_maximum_counts_a_mask_in_int64_whatever_the_precision(name: str) -> None:
    graph = largest_of(name, AMAX)
    for width, change in ((4, MemoryChange()), (2, MemoryChange(autocast=True))):
        levels = replay_backward(hold(graph, "cuda", change), keeps_gradients=False)
        x_cast = 20 if change.autocast else 0  # linear keeps its input in bf16
        # The maximum, its input, its gradient; then a mask of 20 elements, and the mask in int64.
        assert levels.peak_bytes == x_cast + width * (2 + 20 + 2) + 20 + 8 * 20
    doubled = hold(graph, "cuda", MemoryChange(batch=2.0))
    levels = replay_backward(doubled, keeps_gradients=False)
    assert levels.peak_bytes == 2 * (4 * (2 + 20 + 2) + 20 + 8 * 20)


def test_a_maximum_that_keeps_indices_needs_no_mask() -> None:
    held = hold(largest_of("MaxBackward0", [["indices", 2, 2, "int64"]]), "cuda", MemoryChange())
    levels = replay_backward(held, keeps_gradients=False)
    assert levels.peak_bytes == 8 + 4 * 2 + 4 * 20  # indices, both gradients


@pytest.mark.parametrize(("device", "product"), [("cuda", 80), ("cpu", 0)])
def test_the_gradient_of_a_softmax_on_a_gpu_begins_with_a_product_in_fp32(
    device: str, product: int
) -> None:
    nodes = [
        ["MmBackward0", 0, [[20, FLOAT]], [[-1, 0]], []],
        ["SoftmaxBackward0", 0, [[20, FLOAT]], [[0, 0]], [["result", 0, 20, FLOAT]]],
        ["SumBackward0", 0, [[1, FLOAT]], [[1, 0]], []],
    ]
    storages = [[80, "activation"]]
    softmax = graph_of(nodes, storages)
    wide = hold(softmax, device, MemoryChange())
    assert replay_backward(wide, keeps_gradients=False).peak_bytes == 3 * 80 + product
    if device == "cuda":  # softmax stays in fp32
        narrow = hold(softmax, device, MemoryChange(autocast=True))
        assert replay_backward(narrow, keeps_gradients=False).peak_bytes == 3 * 80 + product


def test_a_fused_recurrent_cell_runs_in_the_narrow_dtype() -> None:
    """Gates [40] of two products, the cell's state [10] and what it keeps of its own."""
    saved = [["cx", 0, 10, FLOAT], ["input_gates", 1, 40, FLOAT], ["result2", 2, 40, FLOAT]]
    nodes = [
        ["MmBackward0", 0, [[40, FLOAT]], [[-1, 0]], []],
        ["ThnnFusedLstmCellBackward0", 0, [[10, FLOAT]] * 2, [[0, 0], [-1, 0]], saved],
    ]
    storages = [[40, "activation"], [160, "activation"], [160, "activation"]]
    held = hold(graph_of(nodes, storages), "cuda", MemoryChange(autocast=True))
    assert held.widths == [[2], [2, 2]]
    assert held.kept_bytes == 2 * (10 + 40 + 40)


def multiplied(**change: Any) -> tuple[float, float]:
    result = replay_backward(hold(BROADCAST, "cuda", MemoryChange(**change)), keeps_gradients=False)
    return result.kept_bytes, result.peak_bytes


def test_gradients_of_an_elementwise_product_are_as_large_as_its_result() -> None:
    # Kept 80; the result's gradient, and both inputs' before the weights' is summed: 80 each.
    assert multiplied() == (80, 80 + 3 * 80)


def test_an_elementwise_product_with_an_fp32_tensor_has_wide_gradients_under_autocast() -> None:
    # The product's result is narrow, 40 kept; with fp32 weights the rest is fp32.
    kept, peak = multiplied(autocast=True)
    assert (kept, peak) == (40 + 20, 40 + 20 + 3 * 80)


def test_norms_are_fp32_on_a_gpu_and_follow_their_input_on_a_cpu() -> None:
    assert rule_of("NativeLayerNormBackward0", "cuda") == AutocastRule.FULL
    assert rule_of("NativeLayerNormBackward0", "cpu") == AutocastRule.FIRST
    assert rule_of("ConvolutionBackward0", "cpu") == AutocastRule.NARROW
    assert rule_of("ScaledDotProductFlashAttentionBackward0", "cuda") == AutocastRule.NARROW
    assert rule_of("GeluBackward0", "cuda") == AutocastRule.WIDEST


@pytest.mark.parametrize(("after", "width"), [("NllLossBackward0", 2), ("MulBackward0", 4)])
def test_inside_a_cross_entropy_the_softmax_keeps_its_inputs_dtype(after: str, width: int) -> None:
    """PyTorch passes it that dtype; called alone, autocast gives it fp32."""
    nodes = [
        ["MmBackward0", 0, [[20, FLOAT]], [[-1, 0]], []],
        ["LogSoftmaxBackward0", 0, [[20, FLOAT]], [[0, 0]], []],
        [after, 0, [[1, FLOAT]], [[1, 0]], []],
    ]
    graph = graph_of(nodes)
    widths = autocast_widths(graph, autocast_rules(graph, "cuda"))
    assert widths == [[2], [width], [4]]


@pytest.mark.parametrize(
    ("product", "asked", "width"),
    [
        ("MmBackward0", {(2, 0)}, 2),  # x * share.to(x.dtype): x is narrow under autocast
        ("MmBackward0", set(), 4),  # x * share
        ("CosBackward0", {(2, 0)}, 4),  # x is fp32 too
    ],
)
def test_an_fp32_value_that_the_script_casts_takes_the_dtype_of_what_it_meets(
    product: str, asked: set[tuple[int, int]], width: int
) -> None:
    """`exp` is fp32 under autocast, so `.float()` would do nothing there."""
    nodes = [
        [product, 0, [[20, FLOAT]], [[-1, 0]], []],
        ["ExpBackward0", 0, [[10, FLOAT]], [[-1, 0]], []],
        ["UnsqueezeBackward0", 0, [[10, FLOAT]], [[1, 0]], []],
        ["MulBackward0", 0, [[20, FLOAT]], [[0, 0], [2, 0]], []],
    ]
    graph = graph_of(nodes)
    widths = autocast_widths(graph, autocast_rules(graph, "cuda"), frozenset(asked))
    assert widths[3] == [width]


def test_a_narrow_value_that_the_script_casts_to_fp32_widens_what_it_meets() -> None:
    nodes = [
        ["MmBackward0", 0, [[20, FLOAT]], [[-1, 0]], []],
        ["MmBackward0", 0, [[20, FLOAT]], [[-1, 0]], []],
        ["MulBackward0", 0, [[20, FLOAT]], [[0, 0], [1, 0]], []],
    ]
    graph = graph_of(nodes)
    assert autocast_widths(graph, autocast_rules(graph, "cuda"), frozenset({(2, 1)}))[2] == [4]


def test_blocks_are_marked_ones_or_those_with_most_parameters() -> None:
    def module(path: str, kind: str, elements: int, marked: bool = False) -> GraphModule:
        return GraphModule(path=path, type=kind, elements=elements, recomputes=marked)

    layers = [module(f"layers.{n}", "Block", 100) for n in range(3)]
    inner = [module(f"layers.{n}.fc", "Linear", 100) for n in range(3)]
    heads = [module(f"heads.{n}", "Linear", 500) for n in range(3)]
    assert find_block_paths([*layers, *inner, *heads]) == ["layers.0", "layers.1", "layers.2"]
    marked = [module("h.0", "Layer", 1, marked=True), module("h.0.inner", "Layer", 1, marked=True)]
    assert find_block_paths([*layers, *inner, *marked]) == ["h.0"]
    assert find_block_paths(heads) == []


def test_an_activation_that_blocks_share_belongs_to_the_block_that_calls_it() -> None:
    """`act` has one path, outside of the blocks. The first call is made inside block 0; the second
    follows it; the third is made inside block 1."""
    paths = ("convs", "convs.0", "convs.1", "convs.2", "convs.0.lin", "convs.1.lin", "act")
    order = ("convs.0.lin", "act", "convs.0.lin", "act", "convs.1.lin", "act", "convs.1.lin")
    modules = [[path, path[:5], 1, False] for path in paths]
    nodes = [
        ["ReluBackward0", paths.index(path), [[4, FLOAT]], [[place - 1, 0]], []]
        for place, path in enumerate(order)
    ]
    assert block_of_nodes(graph_of(nodes, [], modules)) == [0, 0, 0, -1, 1, 1, 1]


def captured(peak_phase: str = "backward", allocated: int = 5_000) -> CapturedMemory:
    states = {"parameters": 840, "gradients": 0, "optimizer": 1_680, "activations": 120}
    return CapturedMemory(
        device="cuda",
        graph=GRAPH,
        peak=CapturedPeak(categories={}, phase=peak_phase, allocated_bytes=allocated),
        phases=[
            CapturedPhase(phase="forward", categories=states, allocated_bytes=2_640),
            CapturedPhase(phase="backward", categories={**states, "gradients": 840}),
        ],
    )


def memory(line: BatchLine) -> Memory:
    unknown = dict.fromkeys(
        ("batch", "batch_from", "per_sample_bytes", "limit_bytes", "limit_from", "factor",
         "factor_low", "factor_high", "largest", "low", "high")
    )  # fmt: skip
    largest = LargestBatch(lines=(line,), reserve_bytes=0, **unknown)
    return Memory(
        source="capture",
        device="cuda",
        peak_bytes=5_000,
        reserved_bytes=None,
        phase="backward",
        measured="",
        categories={},
        largest_batch=largest,
    )


def test_the_measured_peak_moves_by_what_the_graph_says() -> None:
    line = BatchLine(moment="peak", fixed_bytes=4_880, scaling_bytes=120)
    peak = changed_peak(GraphLevels(captured()), memory(line), MemoryChange(autocast=True))
    assert peak is not None
    # The graph moves by 1240 - 960. Of the 5000, states hold 2520 and the graph 960: the rest of
    # 1520 is workspace, of which half may go.
    assert peak.size_bytes == 5_000 + 280 - 760
    assert peak.low_bytes < peak.size_bytes < peak.high_bytes
    assert peak.high_bytes >= 5_000 + 280


def test_with_fewer_samples_the_highest_moment_of_backward_counts() -> None:
    """The weight's gradient of 800 stays, whatever the batch: 960 become 880. The batch itself has
    40, and half of the 1520 that the graph does not show goes too."""
    half = later_peak(GraphLevels(msgspec.structs.replace(captured(), inputs_bytes=40)), 0.5)
    assert half == 5_000 - 80 - 760 - 20


def test_batches_prepared_for_later_shrink_with_the_batch() -> None:
    several = msgspec.structs.replace(captured(), inputs_bytes=40, prepared_bytes=280)
    assert later_peak(GraphLevels(several), 0.5) == 5_000 - 80 - 760 - 20 - 140


def test_without_an_allocators_account_only_the_lines_are_known() -> None:
    assert later_peak(GraphLevels(captured(peak_phase="optimizer")), 0.5) is None


def test_another_update_counts_when_the_optimizer_holds_most() -> None:
    line = BatchLine(moment="in backward", fixed_bytes=2_880, scaling_bytes=120)
    change = MemoryChange(other_update=True, update_bytes=840)
    peak = changed_peak(GraphLevels(captured("optimizer")), memory(line), change)
    assert peak is not None
    assert peak.size_bytes == 840 + 1_680 + 120 + 840 + 840


def test_a_workspace_is_not_doubtful_where_both_passes_stay_as_measured() -> None:
    """1% either way, though 1520 of the 5000 are workspace."""
    line = BatchLine(moment="peak", fixed_bytes=4_880, scaling_bytes=120)
    change = MemoryChange(other_update=True, update_bytes=10)
    peak = changed_peak(GraphLevels(captured()), memory(line), change)
    assert peak is not None
    assert (peak.low_bytes, peak.size_bytes, peak.high_bytes) == (4_950, 5_000, 5_050)


def test_hidden_nodes_are_not_guessed() -> None:
    line = BatchLine(moment="peak", fixed_bytes=4_880, scaling_bytes=120)
    hidden = msgspec.structs.replace(GRAPH, hidden=3)
    unknown = msgspec.structs.replace(captured(), graph=hidden)
    assert changed_peak(GraphLevels(unknown), memory(line), MemoryChange(recompute=True)) is None


def test_a_graph_that_names_what_is_not_there_is_not_sound() -> None:
    assert GRAPH.is_sound
    assert not msgspec.structs.replace(GRAPH, storages=GRAPH.storages[:2]).is_sound


# Real models: the promise comes from fp32 alone, the truth from the allocator's events.


def attention_model(torch: Any) -> Any:
    layer = functools.partial(torch.nn.TransformerEncoderLayer, 32, 2, 64, batch_first=True)
    layers = torch.nn.ModuleList(layer(dropout=0.0, norm_first=True) for _ in range(4))

    class Model(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = torch.nn.Linear(32, 32), layers
            self.head = torch.nn.Linear(32, 50)

        def forward(self, given: Any) -> Any:
            given = self.first(given)
            for one in self.layers:
                given = one(given)
            return self.head(given).flatten(0, 1)

    return Model()


def recurrent_model(torch: Any) -> Any:
    class Model(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = torch.nn.GRU(32, 32, 2), torch.nn.Linear(32, 50)

        def forward(self, given: Any) -> Any:
            return self.head(self.rnn(given)[0]).flatten(0, 1)

    return Model()


def points_model(torch: Any) -> Any:
    """As PointNet: the largest of 64 points, whose mask is the highest point of backward."""

    class Model(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.points, self.head = torch.nn.Linear(32, 64 * 32), torch.nn.Linear(32, 50)

        def forward(self, given: Any) -> Any:
            points = self.points(given).relu().reshape(-1, 64, 32)
            return self.head(points.amax(1))

    return Model()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("build", "error"), [(attention_model, 0.05), (recurrent_model, 0.1), (points_model, 0.05)]
)
def test_the_allocator_agrees(build: Any, error: float) -> None:
    torch = pytest.importorskip("torch")
    from stepscope.fix.memory_meters import meter_on_host
    from stepscope.measure.memory.memory_step import MemoryStep

    torch.manual_seed(0)
    model, given = build(torch), torch.randn(4, 24, 32)
    labels = torch.randint(50, (96,))
    loss_of = torch.nn.functional.cross_entropy

    def step(autocast: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(given), labels)
        loss.backward()

    def measure(autocast: bool) -> int:
        model.zero_grad()
        return int(meter_on_host(lambda: step(autocast))[1])

    step(False)
    model.zero_grad()
    watch = MemoryStep([torch.optim.SGD(model.parameters(), lr=0.0)])
    watch.begin()
    watch.phase("backward", entering=True)
    step(False)
    watch.phase("backward", entering=False)
    graph = msgspec.convert(watch.end()["graph"], CapturedBackward)

    def promise(**change: Any) -> float:
        held = hold(graph, "cpu", MemoryChange(**change))
        return replay_backward(held, keeps_gradients=False).peak_bytes

    promises = {"now": promise(), "bf16": promise(autocast=True), "blocks": promise(recompute=True)}
    truths = {"now": measure(False), "bf16": measure(True)}
    if build is attention_model:
        for layer in model.layers:
            layer.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False
            )
        truths["blocks"] = measure(False)
    for name, truth in truths.items():
        assert promises[name] == pytest.approx(truth, rel=error), name
