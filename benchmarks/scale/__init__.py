"""How the time of a node replacement grows with the number of ranks."""
