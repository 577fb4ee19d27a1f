"""What the UI says of one fault in the middle of its recovery, after it, and at the end."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.process.harness import Running
from tests.process.truth import task_runs
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    pytest.mark.ui,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

NAME = "moments"
FAULT = f"{NAME}-fault-p1-a1"
PAGES = ("attempts", "fault-p1-a1", "needs-you", "progress", "checkpoints")


class Moments:
    """The run, and what is on its pages now."""

    def __init__(self, running: Running, api, visitor) -> None:
        self.running, self.api, self.visitor = running, api, visitor

    def description(self, name: str) -> str:
        found = self.api.artifacts(f"{NAME}-").get(f"{NAME}-{name}")
        return found["description"] if found is not None else ""

    def wait_for(self, name: str, text: str) -> None:
        wait_for(lambda: text in self.description(name), what=f"{name}: {text}")

    def shows(self, name: str, *texts: str) -> None:
        found = self.api.artifacts(f"{NAME}-")[f"{NAME}-{name}"]
        page = self.visitor.goto(f"/artifacts/artifact/{found['latest_id']}")
        for text in texts:
            expect(page.get_by_text(text).first).to_be_visible()

    def keep(self, moment: str) -> None:
        artifacts = self.api.artifacts(f"{NAME}-")
        for root in ("", "/v2"):
            for name in PAGES:
                if f"{NAME}-{name}" in artifacts:
                    found = artifacts[f"{NAME}-{name}"]
                    self.visitor.goto(f"{root}/artifacts/artifact/{found['latest_id']}")
                    self.visitor.keep(f"{moment}-{name}{root.replace('/', '-')}")
            flow_run = self.api.flow_runs(NAME)[0]["id"]
            self.visitor.goto(f"{root}/runs/flow-run/{flow_run}")
            self.visitor.keep(f"{moment}-run{root.replace('/', '-')}")
            self.visitor.page.get_by_text("Artifacts", exact=True).last.click()
            self.visitor.keep(f"{moment}-artifacts{root.replace('/', '-')}")


@pytest.fixture
def moments(bench, api, visitor) -> Moments:
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 0, "grace_s": 10}
    restart = {"pod_retries": 1, "spare_wait_s": 600, "node_replace": False}
    job = bench.apart(NAME, engine=engine, restart=restart, env={"PACE_S": "0.3"})
    return Moments(bench.start(job), api, visitor)


def test_an_adopted_run_leaves_nothing_running_in_the_flow_run_before(bench, api, visitor):
    name = "moments-adopted"
    job = bench.pair(name, steps=40, env={"PACE_S": "0.3"})
    first = bench.start(job)
    first.reach(5)
    first.pace(3.0)
    first.kill_supervisor()
    second = bench.start(job)
    wait_for(lambda: second.history.epoch == 2, what="the adoption")
    before = api.flow_runs(name)[-1]["id"]
    page = visitor.goto(f"/runs/flow-run/{before}")
    page.get_by_text("Task Runs", exact=True).first.click()
    expect(page.get_by_text("Adopted").first).to_be_visible()
    visitor.keep("0-adopted-before")
    left = next(
        one["id"] for one in task_runs(api, name) if one["name"] == "attempt 1.1 from step 0"
    )
    page = visitor.goto(f"/v2/runs/task-run/{left}")
    expect(page.get_by_text("went on and was adopted by supervisor 2").first).to_be_visible()
    visitor.keep("0-adopted-attempt-v2")
    after = api.flow_runs(name)[0]["id"]
    page = visitor.goto(f"/runs/flow-run/{after}")
    page.get_by_text("Task Runs", exact=True).first.click()
    expect(page.get_by_text("attempt 1.1 (adopted)").first).to_be_visible()
    visitor.keep("0-adopted-after")
    second.complete()


def test_a_lost_node_is_told_rightly_at_every_moment(moments, bench):
    running = moments.running
    running.reach(12)
    moments.wait_for("attempts", "Attempt 1.1 is training")
    moments.wait_for("needs-you", "Nothing needs you")
    assert running.local.kill_node("node-1")

    moments.wait_for("needs-you", "2 things need you")
    moments.wait_for("attempts", "Attempt 1.1 failed (node_lost)")
    moments.shows(
        "fault-p1-a1", "What broke?", "Not yet: the run waits for a healthy node",
        f"perdure nodes {NAME} --release node-1",
    )  # fmt: skip
    moments.shows("needs-you", "Node node-1 is isolated", "The run waits for a node")
    moments.shows("progress", "waiting for a healthy node, step")
    moments.keep("1-recovering")

    running.pace(1.5)
    bench.perdure("nodes", NAME, "--release", "node-1")
    moments.wait_for("fault-p1-a1", "(over)")
    moments.wait_for("attempts", "Attempt 2.1 is training, after 1 failed attempt")
    moments.wait_for("needs-you", "Nothing needs you")
    moments.shows("fault-p1-a1", "attempt 2.1 trains from step 10", "was released")
    moments.keep("2-recovered")

    assert running.finish() == 0, running.out
    moments.wait_for("attempts", "Completed after 2 attempts")
    moments.wait_for("progress", "completed, step 60 / 60")
    moments.shows("checkpoints", "when it was written")
    moments.keep("3-ended")
    running.leave_nothing()
