"""Encodings of what backward keeps, exact or marked lossy, in torch's own operators."""

from stepscope.fix.saved.encodings.encoded import Encoded as Encoded
from stepscope.fix.saved.encodings.encoded import Geometry as Geometry
from stepscope.fix.saved.encodings.outcomes import encode_use as encode_use
from stepscope.fix.saved.encodings.outcomes import is_outcome as is_outcome
from stepscope.fix.saved.encodings.outcomes import outcome_bytes as outcome_bytes
from stepscope.fix.saved.encodings.outcomes import outcome_for as outcome_for
from stepscope.fix.saved.encodings.registry import encode_value as encode_value
from stepscope.fix.saved.encodings.whole_values import pooling_spec as pooling_spec
