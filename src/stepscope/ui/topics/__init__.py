"""What every surface says about a topic: sentences, rows of tables and JSON.

Nothing here prints, draws or opens a server.
"""
