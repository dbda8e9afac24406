"""Keep less for backward in compiled models: the plan becomes part of the compiled graph.

AOTAutograd splits a model's joint graph into forward and backward. partitioner.py takes that split
and rebuilds it so that backward gets fewer values: step_graph.py reads both graphs, operator_costs.py
times their operators, recompute_ladder.py finds which values to recompute at what cost (min_cut.py),
graph_memory.py simulates memory and time of a choice. compiled_saver.py is what users hold.
"""
