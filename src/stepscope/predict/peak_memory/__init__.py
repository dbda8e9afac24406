"""Peak memory of a changed step, worked out from the captured backward graph.

autocast_widths.py   how wide results would be under autocast
graph_blocks.py      which nodes belong to blocks that could be recomputed
held_values.py       what the graph keeps for backward, with the changes made
node_level.py        bytes while one node runs
forward_levels.py    bytes through the forward pass
backward_levels.py   bytes through the backward pass
passes_peak.py       the highest point of both, with the workspaces of the captured peak
peak_change.py       the changes together -> a peak with an interval
"""
