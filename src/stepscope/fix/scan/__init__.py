"""Backward through time in logarithmic depth.

    from stepscope.fix.scan import scan_backward

textbook.py has the scans as they are taught, affine_maps.py the one for recurrences, kernels.py the
same for GPUs, rnn_layer.py the operator, scan_rnn.py the module. For GRU and LSTM these are
step_jacobians.py, gated_cells.py, gated_layer.py and scan_gated.py. linear_recurrence.py scans
h = a * h + b, horizon.py says how far back a gradient reaches at all, and recommend.py which
backward pass is the fastest here.
"""

from stepscope.fix.scan.chain import scan_chain as scan_chain
from stepscope.fix.scan.linear_recurrence import linear_scan as linear_scan
from stepscope.fix.scan.modules import ScanGRU as ScanGRU
from stepscope.fix.scan.modules import ScanLSTM as ScanLSTM
from stepscope.fix.scan.modules import ScanRNN as ScanRNN
from stepscope.fix.scan.modules import scan_backward as scan_backward
from stepscope.fix.scan.recommend import gradient_horizon as gradient_horizon
from stepscope.fix.scan.recommend import recommend as recommend
