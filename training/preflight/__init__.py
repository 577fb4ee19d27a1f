"""Checks of a job before its run starts: settings, program, storage."""
