"""What of a run needs a person, and what to do about it."""

from __future__ import annotations

from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import AnyRecord, RunCreated, RunEnded
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.action_items import NeedKind, NeedsYou, attention, spares_of
from tests.unit.journal.histories import (
    BEGINNING,
    HOT,
    NOW,
    decided,
    over,
    seen,
    started,
)

WITH_A_SPARE = RunCreated(**NOW, job={"engine": {"spares": 1}})


def history_of(*records: AnyRecord) -> RunHistory:
    first, _, *rest = BEGINNING
    return replay([first, WITH_A_SPARE, *rest, *records])


def needs(*records: AnyRecord, spares: list[str] | None) -> NeedsYou:
    return attention("small", history_of(*records), spares=spares)


def test_where_nothing_needs_anybody_the_page_says_so_and_counts_the_spares():
    found = needs(spares=["node-2"])
    assert found.title == "Nothing needs you"
    assert found.body == (
        "Nothing needs you: no node is isolated and no alert is open.\n\nSpares left: 1 (node-2).\n"
    )
    assert "Spares" not in needs(spares=None).body


def test_nodes_on_which_a_container_stands_by_are_named():
    history = history_of()
    one = attention("small", history, spares=["node-2"], warm=["node-2"])
    assert "Spares left: 1 (node-2). A container stands by on node-2.\n" in one.body
    two = attention("small", history, spares=None, warm=["n3", "n4"])
    assert "\n\nContainers stand by on n3 and n4.\n" in two.body


def test_an_isolated_node_is_to_be_mended_and_released():
    isolating = (over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"), started(2))
    found = needs(*isolating, spares=["node-3"])
    assert found.title == "1 thing needs you"
    assert "`perdure nodes small --release node-1`" in found.body
    assert "native\\_crash: SIGKILL" in found.body
    both = needs(*isolating, spares=[])
    assert both.title == "2 things need you"
    assert "### No spare is left" in both.body


def test_a_run_that_waits_for_a_node_says_so():
    found = needs(over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"), spares=[])
    assert found.title == "2 things need you"
    assert "### The run waits for a node" in found.body


def test_a_job_that_asks_for_no_spare_is_not_told_that_none_is_left():
    assert attention("small", replay(BEGINNING), spares=[]).title == "Nothing needs you"


def test_an_open_alert_needs_somebody_and_a_past_one_does_not():
    found = needs(*seen(HOT), spares=["node-2"])
    assert "Alert: memory\\_high" in found.body
    assert "Look at node-1, device 3" in found.body
    assert needs(*seen(HOT), over(), decided(), spares=["node-2"]).title == "Nothing needs you"


def test_a_failed_run_names_what_to_do():
    fault = Fault(FaultClass.USER_CODE_ERROR, 0.0, "x", action="Fix the program.")
    end = RunEnded(**NOW, outcome="failed", message="user code")
    found = needs(over(fault=fault), decided(1, Rung.STOP), end, spares=[])
    assert found.title == "1 thing needs you", "an ended run needs no spare"
    assert "### The run has failed" in found.body
    assert "Fix the program. Then `perdure run JOB.yaml`" in found.body


def test_spares_are_healthy_nodes_that_the_run_does_not_use():
    nodes = ["node-0", "node-1", "node-2", "node-3"]
    isolating = (over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-3"))
    assert spares_of(nodes, history_of(*isolating)) == ["node-2"]


def test_each_need_is_there_by_itself_in_plain_text():
    isolating = (over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"), started(2))
    isolated, spare = needs(*isolating, spares=[]).needs
    assert (isolated.kind, isolated.node, isolated.what) == (
        NeedKind.ISOLATED,
        "node-1",
        "Node node-1 is isolated",
    )
    assert "native_crash: SIGKILL" in isolated.why
    assert isolated.action.endswith("then `perdure nodes small --release node-1`")
    assert spare.kind is NeedKind.NO_SPARE
