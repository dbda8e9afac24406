"""What editors show: the cost of each line, estimates, edits followed, the batch size.

Plain functions on paths and texts; the language server is thin over them. Import them from their
modules: a server must start at once, and some need all of `explain`.
"""
