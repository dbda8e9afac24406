"""The language server: what each line of a training script costs, in any editor.

Thin over ui/editor, which measures, estimates and follows lines. Here are the protocol, the state
of open scripts, and the children that do the work: the server's own loop only answers.
"""
