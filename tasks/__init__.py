"""Prefect tasks and state hooks: one side effect each, idempotent."""

from __future__ import annotations

if __name__ != "perdure.tasks":
    raise ImportError("write `import perdure.tasks`: this folder is not a package of its own")
