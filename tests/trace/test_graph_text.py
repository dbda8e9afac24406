"""Graphs and code as torch 2.13 prints them, cut down to what matters."""
# ruff: noqa: E501

from __future__ import annotations

from stepscope.records.source_lines import Place
from stepscope.trace.run_folder.graph_text import placeholders, read_graph, returned_nodes
from stepscope.trace.run_folder.inductor_code import read_code

GRAPH = """
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[8, 4][4, 1]cpu", w: "bf16[4, 2][2, 1]cpu", n: "Sym(s0)", d: "f32[s0, 4]"):
        # File: /home/me/train.py:10 in forward, code: h = x @ w
        mm: "f32[8, 2][2, 1]cpu" = torch.ops.aten.mm.default(x, w);  w = None
        cat: "f32[8, 6][6, 1]cpu" = torch.ops.aten.cat.default([x, mm], 1);  x = None

        # File: /home/me/a:b.py:12 in loss, code: return f(h, {1: (2, 3)})
        sum_1: "f32[8][1]cpu" = torch.ops.aten.sum.dim_IntList(cat, [1], True, dtype = torch.float32)
        var_mean = torch.ops.aten.var_mean.correction(mm, [1], correction = 0)
        getitem: "f32[8, 1][1, 1]cpu" = var_mean[0]
        sub: "f32[8, 2][2, 1]cpu" = torch.ops.aten.sub.Tensor(mm, getitem)
        long: "f32[s0, 2]" = torch.ops.aten.mm.default(d, w)
        return (sub, sum_1)
"""
CODE = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
def triton_poi_fused_add_0(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
''')
# Topologically Sorted Source Nodes: [h, add], Original ATen: [aten.add, aten.mul]
# Graph fragment:
#   %mul : Tensor "f32[8, 2][2, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = ())
#   %add : Tensor "f32[8, 2][2, 1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = ())
triton_poi_fused_add_mul_1 = async_compile.triton('triton_poi_fused_add_mul_1', '''
def triton_poi_fused_add_mul_1(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
''')
    def call(self, args):
        buf0 = empty_strided_cuda((8, 2), (2, 1), torch.float32)
        # Topologically Sorted Source Nodes: [h], Original ATen: [aten.mm]
        extern_kernels.mm(x, w, out=buf0)
        buf1 = buf0; del buf0  # reuse
        triton_poi_fused_add_0.run(buf1, 16, stream=stream0)
        buf2 = reinterpret_tensor(w, (8, 2), (2, 1), 0); del w  # reuse
        triton_poi_fused_add_mul_1.run(buf1, buf2, 16, stream=stream0)
        buf4 = torch.ops.aten.topk.default(buf2, 2)
        return (buf1, reinterpret_tensor(buf2, (2, 8), (1, 2), 0), )
def get_args():
    return (x, w)
"""


def test_operators_have_shapes_values_inputs_and_lines() -> None:
    mm, cat, total, _, sub, symbolic = read_graph(GRAPH)
    assert (mm.name, mm.shapes, mm.dtypes) == (
        "aten::mm", [[8, 4], [4, 2]], ["float", "c10::BFloat16"],
    )  # fmt: skip
    assert (mm.inputs, mm.size_bytes) == (("x", "w"), 64)
    assert mm.place == Place(file="/home/me/train.py", line=10, function="forward")
    assert (cat.shapes, cat.dtypes, cat.concrete) == (
        [[[8, 4], [8, 2]], []], ["TensorList", "Scalar"], ["", "1"],
    )  # fmt: skip
    assert (total.shapes, total.concrete) == ([[8, 6], [], []], ["", "[1]", "True"])
    assert total.place == Place(file="/home/me/a:b.py", line=12, function="loss")
    assert sub.shapes == [[8, 2], [8, 1]]
    assert (symbolic.shapes[0], symbolic.size_bytes) == (["?"], None)


def test_text_that_is_no_graph_has_no_operators() -> None:
    assert read_graph("") == read_graph("x = 1\n\n)") == ()
    assert placeholders("nothing") == {}


def test_what_a_graph_returns_are_operators_also_where_they_have_several_results() -> None:
    assert returned_nodes(GRAPH) == ("sub", "sum_1")
    assert returned_nodes(GRAPH.replace("(sub,", "(getitem,")) == ("var_mean", "sum_1")
    assert read_graph(GRAPH)[4].inputs == ("mm", "var_mean")


def test_a_node_without_a_stack_has_no_line() -> None:
    before = "        sum_1: "
    text = GRAPH.replace(before, f"        # No stacktrace found for following nodes\n{before}")
    assert [one.place is None for one in read_graph(text)] == [False, False, *[True] * 4]


def test_calls_have_the_tensors_that_they_read_and_write() -> None:
    assert placeholders(GRAPH) == {"x": 128, "w": 16}
    code = read_code(CODE, {"x": 128, "w": 16})
    mm, first, second, library = code.calls
    assert (mm.name, mm.operator, mm.size_bytes) == ("extern_kernels.mm", "aten::mm", 128 + 16 + 64)
    assert (mm.reads, mm.writes) == (("x", "w"), ("buf0",))
    assert (first.name, first.reads, first.writes) == (
        "triton_poi_fused_add_0", ("buf1",), ("buf1",),
    )  # fmt: skip
    assert (second.reads, second.writes) == (("buf1",), ("buf2",))
    assert second.nodes == ("mul", "add")
    assert (library.operator, library.reads, library.writes) == ("aten::topk", ("buf2",), ("buf4",))
    assert code.returned == ("buf1", "buf2")
    # buf1 is buf0 under another name; buf2 is another tensor in the memory of w.
    assert code.same == {"buf1": "buf0"}
    assert code.renamed == {"buf1": "buf0", "buf2": "w"}


# What calls in Inductor's code read and write.

CODE_OF_INDUCTOR_CODE = """
cpp_fused__to_copy_0 = async_compile.cpp_pybinding(['const float*', 'at::BFloat16*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       const at::BFloat16* in_ptr1,
                       at::BFloat16* out_ptr0,
                       const int64_t ks0)
{
}
''')
def call(args):
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.bfloat16)
        cpp_fused__to_copy_0(primals_1, primals_2, buf0, s0)
        return (buf0, )
"""


def test_a_cpp_kernel_with_types_of_a_namespace_writes_its_outputs() -> None:
    """Where `at::BFloat16*` hides the names, every tensor looks as if it were read."""
    (call,) = read_code(CODE_OF_INDUCTOR_CODE, {"primals_1": 128, "primals_2": 64}).calls
    assert call.writes == ("buf0",)
    assert call.reads[:2] == ("primals_1", "primals_2")
