"""Checks of nodes and chips, before a run and before a restart in place."""
