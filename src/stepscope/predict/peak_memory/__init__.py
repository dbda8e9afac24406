"""Peak memory of a changed step, worked out from the captured backward graph.

autocast_widths.py       how wide results would be under autocast
graph_blocks.py          which nodes belong to blocks that could be recomputed
held_values.py           what the graph keeps for backward, with the changes made
node_level.py            bytes while one node runs
forward_levels.py        bytes through the forward pass
backward_levels.py       bytes through the backward pass
backward_temporaries.py  what gradients of maxima and softmaxes need beside them
graph_levels.py          both passes of a captured graph, worked out once for each change
standing_bytes.py        what the passes hold besides their graph: states, old gradients, batches
convolution_layout.py    convolutions whose tensors tensor cores do not read as they are
convolution_buffers.py   what cuDNN needs beside the tensors of a convolution
passes_peak.py           the highest point of both, with the workspaces of the captured peak
grown_peak.py            the highest point of both with another batch
peak_change.py           the changes together -> a peak with an interval
"""
