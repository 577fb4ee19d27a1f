"""Nodes that a platform has given: one `perdure launch` on each, in place of torchrun."""
