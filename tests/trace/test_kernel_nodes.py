"""Which operators a kernel computes, in code that Inductor (torch 2.13) writes for a CPU."""
# ruff: noqa: E501

from __future__ import annotations

from stepscope.records.compiled import GraphOperator
from stepscope.trace.run_folder.inductor_code import CodeCall, InductorCode, _Join, read_kernels

# h = x @ w; a = gelu-like(h); y = norm(a) @ v; the sum of a is saved too.
GRAPH = """
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[8, 4][4, 1]cpu", w: "f32[4, 4][4, 1]cpu", v: "f32[4, 2][2, 1]cpu"):
        # File: model.py:3 in forward, code: h = x @ w
        mm: "f32[8, 4][4, 1]cpu" = torch.ops.aten.mm.default(x, w)
        # File: model.py:4 in forward, code: a = h.tanh() + 1
        tanh: "f32[8, 4][4, 1]cpu" = torch.ops.aten.tanh.default(mm);  mm = None
        add: "f32[8, 4][4, 1]cpu" = torch.ops.aten.add.Tensor(tanh, 1)
        # File: model.py:5 in forward, code: a = a / a.sum(1)
        sum_1: "f32[8, 1][1, 1]cpu" = torch.ops.aten.sum.dim_IntList(add, [1], True)
        div: "f32[8, 4][4, 1]cpu" = torch.ops.aten.div.Tensor(add, sum_1)
        view: "f32[8, 4][4, 1]cpu" = torch.ops.aten.reshape.default(div, [8, 4]);  div = None
        # File: model.py:6 in forward, code: return a @ v
        mm_1: "f32[8, 2][2, 1]cpu" = torch.ops.aten.mm.default(view, v);  view = v = None
        return (mm_1, add)
"""
KERNELS = """
cpp_fused_tanh_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0,
                       float* out_ptr1)
{
}
''')
cpp_fused_div_1 = async_compile.cpp_pybinding(['float*', 'const float*', 'const float*'], r'''
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       const float* in_ptr1)
{
}
''')
"""
CALLS = """
    def call(self, args):
        x, w, v = args
        buf0 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
        extern_kernels.mm(x, w, out=buf0)
        buf1 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
        buf2 = empty_strided_cpu((8, 1), (1, 1), torch.float32)
        cpp_fused_tanh_0(buf0, buf1, buf2)
        buf3 = reinterpret_tensor(buf0, (8, 4), (4, 1), 0); del buf0  # reuse
        cpp_fused_div_1(buf3, buf1, buf2)
        buf4 = empty_strided_cpu((8, 2), (2, 1), torch.float32)
        extern_kernels.mm(reinterpret_tensor(buf3, (8, 4), (4, 1), 0), v, out=buf4)
        return (buf4, buf1, )
"""


def nodes(graph: str, code: str) -> list[tuple[str, ...]]:
    return [kernel.nodes for kernel in read_kernels(graph, code)]


def test_loops_compute_what_lies_between_the_tensors_they_read_and_write() -> None:
    # buf1 is known by what is returned, buf3 by what mm_1 reads, buf2 by its size alone.
    assert nodes(GRAPH, KERNELS + CALLS) == [
        ("mm",),
        ("tanh", "add", "sum_1"),
        ("div",),
        ("mm_1",),
    ]


def test_products_are_told_apart_by_their_operands() -> None:
    """The graph's two products in the other order: the code's first one reads w."""
    other = CALLS.replace("(x, w,", "(x, w2,")
    assert nodes(GRAPH, KERNELS + other)[0] == ()
    both = GRAPH.replace(
        "mm.default(x, w)\n",
        'mm.default(x, w)\n        mm_9: "f32[8, 4]" = torch.ops.aten.mm.default(x, u)\n',
    )
    assert nodes(both.replace("w: ", 'u: "f32[4, 4]", w: '), KERNELS + CALLS)[0] == ("mm",)


def test_parts_of_one_tensor_and_copies_into_another_layout() -> None:
    graph = """
    def forward(self, x: "f32[8, 4][4, 1]cpu", w: "f32[4, 4][4, 1]cpu"):
        # File: model.py:3 in forward, code: cat
        tanh: "f32[8, 4][4, 1]cpu" = torch.ops.aten.tanh.default(x)
        cat: "f32[8, 8][8, 1]cpu" = torch.ops.aten.cat.default([x, tanh], 1)
        convolution: "f32[8, 4]" = torch.ops.aten.convolution.default(x, w, None)
        return (cat, convolution)
"""
    code = """
cpp_fused_cat_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
''')
cpp_fused_1 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
''')
    def call(self, args):
        buf2 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        buf1 = reinterpret_tensor(buf2, (8, 4), (8, 1), 4)  # alias
        cpp_fused_cat_0(x, buf1)
        buf3 = empty_strided_cpu((4, 4), (1, 4), torch.float32)
        cpp_fused_1(w, buf3)
        buf4 = extern_kernels.convolution(x, buf3, stride=(1, 1), bias=None)
        return (buf2, buf4, )
"""
    cat, copy, convolution = nodes(graph, code)
    assert cat == ("tanh", "cat")
    assert (copy, convolution) == (("convolution",), ("convolution",))


def test_a_sum_in_two_kernels_is_one_operator() -> None:
    """The first leaves partial sums, which are no node of the graph."""
    graph = """
    def forward(self, x: "f32[800, 4][4, 1]cuda:0"):
        # File: model.py:3 in forward, code: x.exp().sum()
        exp: "f32[800, 4][4, 1]cuda:0" = torch.ops.aten.exp.default(x)
        sum_1: "f32[][]cuda:0" = torch.ops.aten.sum.default(exp)
        return (sum_1,)
"""
    code = """
triton_red_fused_exp_sum_0 = async_compile.triton('triton_red_fused_exp_sum_0', '''
def triton_red_fused_exp_sum_0(in_ptr0, out_ptr0, xnumel, r0_numel):
''')
triton_per_fused_exp_sum_1 = async_compile.triton('triton_per_fused_exp_sum_1', '''
def triton_per_fused_exp_sum_1(in_ptr0, out_ptr0, xnumel, r0_numel):
''')
    def call(self, args):
        buf0 = empty_strided_cuda((25, ), (1, ), torch.float32)
        triton_red_fused_exp_sum_0.run(x, buf0, 25, 128, stream=stream0)
        buf1 = empty_strided_cuda((), (), torch.float32)
        triton_per_fused_exp_sum_1.run(buf0, buf1, 1, 25, stream=stream0)
        return (buf1, )
"""
    assert nodes(graph, code) == [("exp", "sum_1"), ("exp", "sum_1")]


def test_a_comment_about_a_kernel_s_first_call_holds_where_the_tensors_say_another() -> None:
    graph = """
    def forward(self, x: "f32[8][1]cuda:0"):
        exp: "f32[8][1]cuda:0" = torch.ops.aten.exp.default(x)
        sin: "f32[8][1]cuda:0" = torch.ops.aten.sin.default(x)
        return (exp, sin)
"""
    code = """
# Graph fragment:
#   %sin : Tensor "f32[8][1]cuda:0"[num_users=1] = call_function[target=torch.ops.aten.sin.default](args = (%x,), kwargs = {})
triton_poi_fused_sin_0 = async_compile.triton('triton_poi_fused_sin_0', '''
''')
    def call(self, args):
        triton_poi_fused_sin_0.run(x, buf0, 8, stream=stream0)
        return (buf0, buf1, )
"""
    assert nodes(graph, code) == [("sin",)]


def test_text_that_is_no_code_has_no_kernels() -> None:
    assert read_kernels("", "") == ()
    assert read_kernels("nothing", "x = 1\n)(") == ()


def test_many_calls_of_one_operator_are_matched_in_their_order() -> None:
    number = 60
    operators = [
        GraphOperator(
            node=f"mm_{n}", name="aten::mm", shapes=[], dtypes=[], concrete=[],
            inputs=(f"mm_{n - 1}" if n else "x", f"w{n}"),
        )
        for n in range(number)
    ]  # fmt: skip
    code = InductorCode(
        calls=tuple(
            CodeCall(
                name="extern_kernels.mm", is_loop=False, operator="aten::mm",
                reads=(f"buf{n - 1}" if n else "x", f"w{n}"), writes=(f"buf{n}",),
                nodes=(), tensors=frozenset(), size_bytes=None,
            )
            for n in range(number)
        )
    )  # fmt: skip
    join = _Join(operators, code)
    tried: list[str] = []
    fit = join._fit
    join._fit = lambda call, node: (tried.append(node), fit(call, node))[1]  # type: ignore[method-assign]
    join.match_libraries()
    assert join._library == {n: f"mm_{n}" for n in range(number)}
    assert len(tried) == number
