"""What calls in Inductor's code read and write."""

from __future__ import annotations

from stepscope.trace.run_folder.inductor_code import read_code

CODE = """
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
    (call,) = read_code(CODE, {"primals_1": 128, "primals_2": 64}).calls
    assert call.writes == ("buf0",)
    assert call.reads[:2] == ("primals_1", "primals_2")
