"""Keep less for backward in compiled models: the plan becomes part of the compiled graph.

AOTAutograd splits a model's joint graph into forward and backward. partitioner.py takes that split
and builds it again, so that backward gets fewer values: joint_graph.py reads both graphs,
operator_costs.py times their operators, recompute_ladder.py finds what to recompute at what cost,
and graph_memory.py simulates memory and time of a choice. compiled_saver.py is what users hold.
"""
