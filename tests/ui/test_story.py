"""What a user sees in the Prefect UI of a run that was broken three times."""

from __future__ import annotations

import logging

import pytest
from playwright.sync_api import expect
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure.tasks.artifacts import Artifact, ArtifactKind
from perdure.tasks.reporting import Reporter
from perdure.training.reporting.rows import alert_cells, alert_rows
from tests.ui.conftest import TIMEOUT_MS
from tests.unit.journal.histories import COOLED, HOT, history_of
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    pytest.mark.ui,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning"),
]

NAME = "main-job"
REPORT = f"{NAME}-fault-p1-a2"  # of the lost node


@pytest.fixture(scope="module")
def artifacts(broken, api) -> dict[str, dict]:
    """Every artifact of the run."""
    keys = {f"{NAME}-{name}" for name in ("attempts", "checkpoints", "ettr", "timeline", "loss")}
    wait_for(lambda: keys <= set(api.artifacts(f"{NAME}-")), timeout_s=30, what="all artifacts")
    return api.artifacts(f"{NAME}-")


@pytest.fixture(params=["v1", pytest.param("v2", marks=pytest.mark.long)])
def root(request) -> str:
    """Where the pages of both UIs begin."""
    return {"v1": "", "v2": "/v2"}[request.param]


# Polled as one: V2 redraws a page while it loads.
DRAWN = """() => {
    const pictures = [...document.querySelectorAll("img[src^='data:image/png']")];
    return pictures.length > 0 && pictures.every(one => one.complete && one.naturalWidth > 500);
}"""


def test_the_page_of_the_run_shows_attempts_states_and_reasons(broken, api, visitor, root):
    run_id = api.flow_runs(NAME)[0]["id"]
    page = visitor.goto(f"{root}/runs/flow-run/{run_id}")
    expect(page.get_by_text(NAME, exact=True).first).to_be_visible()
    expect(page.get_by_text("Completed").first).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible()
    visitor.keep(f"run{root.replace('/', '-')}")
    page.get_by_text("Task Runs", exact=True).first.click()
    for text in (
        "placement 1 on node-0,node-1",
        "attempt 1.1 from step 0",
        "RestartAfterHang",
        "ReschedulePod",
        "placement 2 on node-0,node-2",
    ):
        expect(page.get_by_text(text).first).to_be_visible()
    visitor.keep(f"tasks{root.replace('/', '-')}")
    page.get_by_text("Artifacts", exact=True).last.click()
    for text in (f"{NAME}-timeline", "node_lost -> pod_reschedule (over)", "1 thing needs you"):
        expect(page.get_by_text(text).first).to_be_visible()
    visitor.keep(f"artifacts{root.replace('/', '-')}")


def test_the_state_of_an_attempt_shows_class_place_step_and_evidence(broken, api, visitor, root):
    task_run_id = api.task_run_ids(NAME)["attempt 1.1 from step 0"]
    page = visitor.goto(f"{root}/runs/task-run/{task_run_id}")
    expect(page.get_by_text("hang on rank 0 on node-0").first).to_be_visible()
    expect(page.get_by_text("hang_restart").first).to_be_visible()
    visitor.keep(f"attempt{root.replace('/', '-')}")


def test_a_fault_report_is_read_without_opening_a_log(artifacts, visitor, root):
    page = visitor.goto(f"{root}/artifacts/artifact/{artifacts[REPORT]['latest_id']}")
    for text in (
        "What broke?",
        "the agent of node-1 is gone",
        "pod_reschedule",
        "is isolated",
        "spare used: node-2 in place of node-1",
        "attempt 2.1 trains from step",
        "perdure nodes main-job --release node-1",
        "perdure logs main-job --attempt 1.2",
    ):
        expect(page.get_by_text(text).first).to_be_visible()
    visitor.keep(f"fault{root.replace('/', '-')}")


def test_the_account_of_the_time_adds_up_on_the_page(artifacts, visitor, root):
    page = visitor.goto(f"{root}/artifacts/artifact/{artifacts[f'{NAME}-ettr']['latest_id']}")
    for text in ("productive_step", "detection", "recovery_pod_reschedule", "wall time", "100.0%"):
        expect(page.get_by_text(text).first).to_be_visible()
    expect(page.get_by_text("ETTR ").first).to_be_visible()
    visitor.keep(f"ettr{root.replace('/', '-')}")


@pytest.mark.parametrize("name", ["timeline", "loss"])
def test_pictures_are_drawn(artifacts, visitor, root, name):
    page = visitor.goto(f"{root}/artifacts/artifact/{artifacts[f'{NAME}-{name}']['latest_id']}")
    page.wait_for_function(DRAWN, timeout=TIMEOUT_MS)
    visitor.keep(f"{name}{root.replace('/', '-')}")


WORDS = {
    "attempts": ("process_replace", "hang_restart", "pod_reschedule", "native_crash", "node_lost"),
    "checkpoints": ("kept, the newest of step 60", "when it was written", "by attempt"),
}


@pytest.mark.parametrize("name", WORDS)
def test_tables_are_tables(artifacts, visitor, root, name):
    page = visitor.goto(f"{root}/artifacts/artifact/{artifacts[f'{NAME}-{name}']['latest_id']}")
    for text in WORDS[name]:
        expect(page.get_by_text(text).first).to_be_visible()
    visitor.keep(f"{name}{root.replace('/', '-')}")


def test_alerts_are_shown_as_open_or_past(api, visitor, root, prefect_server):
    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}):
        reporter = Reporter("hot", None, logging.getLogger("test"))
        past = HOT.model_copy(update={"number": 2, "text": "memory at 97 %"})
        over = COOLED.model_copy(update={"number": 2})
        rows = [alert_cells(row) for row in alert_rows(history_of(HOT, past, over))]
        reporter.artifact(Artifact("alerts", ArtifactKind.TABLE, rows, "Alerts: 1 open, 1 past"))
        reporter.start()
        reporter.close()
    (artifact,) = api.artifacts("hot-alerts").values()
    page = visitor.goto(f"{root}/artifacts/artifact/{artifact['latest_id']}")
    for text in ("memory_high", "memory at 98 %", "open", "past", "node-1, device 3"):
        expect(page.get_by_text(text).first).to_be_visible()
    expect(page.get_by_text("1 open, 1 past").first).to_be_visible()
    visitor.keep(f"alerts{root.replace('/', '-')}")
