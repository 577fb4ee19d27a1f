"""Callbacks that hand the loop of another framework over to Perdure."""
