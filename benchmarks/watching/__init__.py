"""What watching costs: its parts alone, and all of it in a run that is watched block by block."""
