"""The Grafana dashboard asks for what the coordinator exports, and for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perdure.training.coordinator.metrics import AttemptNow, RunMetrics
from perdure.training.journal.events import StepRecord
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import RecoveryBegan, RecoveryEnded
from perdure.training.recovery.rungs import Decision, Recovery, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.wire.node import DeviceSample, HostSample, NodeSample

FILE = Path(__file__).resolve().parents[2] / "dashboards" / "perdure.json"
GRAFANA_10 = 38
NAME = re.compile(r"\bperdure_[a-z_]+")
# Words before a brace or a bracket that are label names, and no metric's.
LABEL = re.compile(r"{[^}]*}|\bby \([^)]*\)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    asked += [note["expr"] for note in dashboard["annotations"]["list"]]
    return asked + [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]


def exported() -> dict[str, set[str]]:
    """Names of the series of an attempt that has seen everything, and their labels."""
    fault = Fault(fault_class=FaultClass.HANG, at_s=1.0, evidence="silent")
    metrics = RunMetrics(
        ("run", "1", "1"),
        target_step=10,
        state=lambda: AttemptNow(Stage.TRAINING, 1, {"training": 1}),
        past=[Recovery(fault=fault, rung=Rung.HANG_RESTART, progressed=True)],
    )
    metrics.step(StepRecord(1, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1, 0, 1, 1))
    metrics.committed(1, at_s=1.0)
    metrics.record(RecoveryBegan(at_s=1.0, number=1, generation=1, fault=fault,
                                decision=Decision(Rung.STEP_RETRY, None, "")))  # fmt: skip
    metrics.record(RecoveryEnded(at_s=2.0, number=1, generation=2, succeeded=True))
    device = DeviceSample(index=0, utilisation_percent=1, memory_percent=1, temperature_c=1,
                          memory_total_bytes=1, power_w=1, link_is_up=True)  # fmt: skip
    host = HostSample(cpu_percent=1, memory_percent=1, disk_free_percent=1, disk_free_bytes=1)
    metrics.sampled("node-0", NodeSample(at_s=1.0, devices=(device,), host=host))
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_that_is_asked_for_is_exported(dashboard):
    known = exported()
    asked = {name for text in expressions(dashboard) for name in NAME.findall(text)}
    assert len(asked) > 20
    assert asked - set(known) == set()


def test_every_label_that_is_asked_for_is_exported(dashboard):
    known = exported()
    for panel in panels(dashboard):
        for target in panel["targets"]:
            names = NAME.findall(LABEL.sub("", target["expr"]))
            grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            wanted = {label.strip() for group in grouped for label in group.split(",")}
            wanted |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            wanted |= set(re.findall(r"[{,]\s*(\w+)\s*=", target["expr"]))
            for name in names:
                assert wanted <= known[name], (panel["title"], target["expr"])


def test_the_dashboard_is_what_grafana_10_loads(dashboard):
    assert dashboard["schemaVersion"] >= GRAFANA_10
    assert dashboard["id"] is None, "an id of another Grafana would replace a dashboard there"
    source, _ = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    wanted = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    for panel in panels(dashboard):
        assert panel["datasource"] == wanted
        assert all(target["datasource"] == wanted for target in panel["targets"])
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_do_not_lie_upon_each_other(dashboard):
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (column, line)
            for column in range(at["x"], at["x"] + at["w"])
            for line in range(at["y"], at["y"] + at["h"])
        }
        assert max(column for column, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_is_in_the_documentation_and_no_other():
    text = (FILE.parents[1] / "docs" / "watching.md").read_text(encoding="utf-8")
    reported = set(re.findall(r"`(perdure_[a-z_]+)`", text))
    parts = ("_bucket", "_count", "_sum", "_created")
    names = {name for name in exported() if not name.endswith(parts)}
    histograms = {"perdure_step_duration_seconds", "perdure_recovery_duration_seconds"}
    assert reported == names | histograms
