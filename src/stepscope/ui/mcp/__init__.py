"""`stepscope mcp`: questions of other programs, answered in pages of a bounded size."""
