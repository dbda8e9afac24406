"""Backward through time in logarithmic depth.

    from stepscope.fix.scan import scan_backward

textbook.py has the scans as they are taught, affine_maps.py the one for recurrences, kernels.py the
same for GPUs, rnn_layer.py the operator, scan_rnn.py the module.
"""

from stepscope.fix.scan.scan_rnn import ScanRNN as ScanRNN
from stepscope.fix.scan.scan_rnn import scan_backward as scan_backward
