"""Bytes and checkpoints: object stores, the commit protocol, retention.

The bottom layer: it imports nothing of ours and never prefect; torch only where
checkpoints are saved and loaded.
Times are seconds, sizes bytes, steps completed optimizer steps.
"""

from __future__ import annotations

if __name__ != "perdure.storage":
    raise ImportError("write `import perdure.storage`: this folder is not a package of its own")
