"""Everything of Perdure that lives without Prefect."""

from __future__ import annotations

if __name__ != "perdure.training":
    raise ImportError("write `import perdure.training`: this folder is not a package of its own")
