"""Prefect flows: the order of work."""

from __future__ import annotations

if __name__ != "perdure.flows":
    raise ImportError("write `import perdure.flows`: this folder is not a package of its own")
