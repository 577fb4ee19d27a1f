"""The manifests as a user's kubectl makes them."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"


@cache
def documents_of(folder: str) -> tuple[dict[str, Any], ...]:
    """What `kubectl apply -k` of a folder below `deploy/kubernetes` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        assert "CI" not in os.environ, "kubectl is missing"
        pytest.skip("kubectl is missing, so no manifest is checked: apt-get install kubectl")
    command = [kubectl, "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one)
