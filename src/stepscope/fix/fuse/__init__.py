"""Train many small models of one architecture as one.

    from stepscope.fix.fuse import fuse

array.py is the array, stacked.py the tensors that its models compute with, rules/ how each torch
function is computed for all of them, optimizer.py how they step. split_array.py trains what
does not fit at once, sweep.py many settings of one program.
"""

from stepscope.fix.fuse.array import ArrayScaler as ArrayScaler
from stepscope.fix.fuse.array import ModelArray as ModelArray
from stepscope.fix.fuse.array import fuse as fuse
from stepscope.fix.fuse.compiled import CapturedStep as CapturedStep
from stepscope.fix.fuse.split_array import ArrayFit as ArrayFit
from stepscope.fix.fuse.split_array import SplitArray as SplitArray
from stepscope.fix.fuse.split_array import fuse_to_fit as fuse_to_fit
from stepscope.fix.fuse.split_array import largest_array as largest_array
from stepscope.fix.fuse.stacked import NotFusableError as NotFusableError
from stepscope.fix.fuse.stacked import Stacked as Stacked
from stepscope.fix.fuse.sweep import grid as grid
from stepscope.fix.fuse.sweep import sweep as sweep
