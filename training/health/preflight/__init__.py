"""Checks before a run starts: of every node, and of the gang of nodes.

They run where the nodes are: an agent starts `python -m training.health.preflight.node` on each.
Nothing here decides which node is refused for good; `judging` says whose fault a failed check is.
"""
