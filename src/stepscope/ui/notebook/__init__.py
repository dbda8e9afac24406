"""Notebooks: the cell magic %%stepscope. Results show themselves (records/notebook.py).

magic.py        the magic and its options
run_cell.py     a cell's code, run as IPython would run it
"""
