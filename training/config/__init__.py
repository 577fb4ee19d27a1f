"""The job file: its sections, their cross-checks, and one-line errors about them."""
