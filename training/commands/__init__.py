"""A worker that is the user's own command: its ranks, progress, checkpoints and leftovers."""
