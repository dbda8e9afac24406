"""What ranks share: clocks, process groups, collectives and connections."""
