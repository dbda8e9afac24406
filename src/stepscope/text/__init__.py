"""Numbers and words as text: the only room that writes them. Standard library only."""
