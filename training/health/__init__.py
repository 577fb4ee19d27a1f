"""Checks before a run and while it goes on.

Before: an agent starts `perdure.training.health.node_program` on its node (`node_check`), and the
supervisor draws one verdict from the checks of all nodes (`verdict`). Meanwhile: heartbeats,
the silence that is a hang, and the health points.
"""
