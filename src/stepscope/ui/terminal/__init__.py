"""What a terminal shows. Rich is imported only by the functions that print."""
