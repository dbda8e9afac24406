"""Kernels that torch.compile writes. Their names say what was fused, their calls what they touch.

`triton_poi`, `triton_red` and `triton_per` are loops over elements and reductions. They multiply no
matrices, except when a product small enough to become a sum was fused in; the name then says so.
`triton_tem` is a template for products or attention: no trace records how much it computes.
"""

from __future__ import annotations

from stepscope.explain.flops.call import Call, Unknown, total_bytes
from stepscope.explain.flops.cost import UNKNOWN, Cost
from stepscope.records.lazy_pattern import lazy_pattern

PREFIX = "triton_"
_LOOP = lazy_pattern(r"triton_(?:poi|red|per|for|mix|split_scan)_")
_PRODUCT = lazy_pattern(
    r"_(?:mm|bmm|addmm|baddbmm|mv|addmv|dot|vdot|matmul|linear|einsum|convolution|attention|"
    r"scaled_dot_product\w*|flex_attention\w*)(?=_)"
)
# They read a few rows of a table whose whole shape is recorded.
_LOOKUP = lazy_pattern(r"_(?:embedding|index|index_select|gather|scatter|index_put)(?=_)")


def compiled(call: Call) -> Cost:
    """Every tensor is read or written once; no trace records which."""
    if not _LOOP.match(call.name) or _PRODUCT.search(call.name):
        return Cost(flops=UNKNOWN)
    if _LOOKUP.search(call.name):
        return Cost()
    tensors = call.tensors()
    if not tensors:
        raise Unknown
    return Cost(moved=total_bytes(tensors))


def may_multiply(name: str) -> bool:
    """Whether such a kernel could hide matrix products."""
    return not _LOOP.match(name) or _PRODUCT.search(name) is not None
