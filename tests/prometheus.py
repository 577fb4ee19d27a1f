"""A real Prometheus, where it is and what it answers; `make .venv/.prometheus` unpacks it."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin" / "prometheus"
PROGRAM = shutil.which("prometheus") or (str(_UNPACKED) if _UNPACKED.exists() else None)
MISSING = "needs Prometheus: make .venv/.prometheus"


@dataclass(frozen=True, slots=True)
class Answers:
    """What a Prometheus says that listens at an address, `HOST:PORT`."""

    address: str

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{query}") as answer:
            series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return [one for one in series if one["value"][1] != "NaN"]

    def value(self, expression: str) -> float | None:
        """Of the only series, None without one."""
        found = self.ask(expression)
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def is_ready(self) -> bool:
        """Whether it answers questions."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
