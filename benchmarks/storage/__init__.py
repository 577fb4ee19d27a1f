"""Saves and restores beside other programs, in one run: `python -m benchmarks.storage`."""
