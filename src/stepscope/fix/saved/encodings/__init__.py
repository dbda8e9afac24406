"""Encodings of what backward keeps, exact or marked lossy: one file each, one registry.

    bits.py         masks of booleans, a dropout's noise      1 bit an element
    window.py       max pooling's indices                     2, 4 or 8 bits
    sparse.py       a mask and what is not zero               as it compresses
    narrow.py       integers in a shorter type                1, 2 or 4 bytes
    outcomes.py     what one kind of backward node reads      1 or 2 bits, or nothing
    reduced.py      bf16, fp16, fp8 with a scale a block      lossy
    four_bits.py    4 bits with stochastic rounding           lossy

    offload.py      pinned host memory                        nothing on the device

On CPUs they are vectorised torch, on CUDA devices Triton kernels (*_kernels.py) that give the same
bits. trials.py measures them in the recorded pass.
"""

from stepscope.fix.saved.encodings.encoded import Encoded as Encoded
from stepscope.fix.saved.encodings.encoded import Geometry as Geometry
from stepscope.fix.saved.encodings.outcomes import encode_use as encode_use
from stepscope.fix.saved.encodings.outcomes import is_outcome as is_outcome
from stepscope.fix.saved.encodings.outcomes import outcome_bytes as outcome_bytes
from stepscope.fix.saved.encodings.outcomes import outcome_for as outcome_for
from stepscope.fix.saved.encodings.registry import encode_value as encode_value
from stepscope.fix.saved.encodings.window import pooling_spec as pooling_spec
