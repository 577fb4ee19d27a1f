"""What of a run needs a person, and what to do about it."""

from __future__ import annotations

from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import AnyRecord, RunCreated, RunEnded
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.action_items import ActionItems, NeedKind, attention, spares_of
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
    first, _, *later = BEGINNING
    return replay([first, WITH_A_SPARE, *later, *records])


def needs(*records: AnyRecord, spares: list[str] | None) -> ActionItems:
    return attention("small", history_of(*records), spares=spares)


def test_where_nothing_needs_anybody_the_page_says_so_and_counts_the_spares():
    result = needs(spares=["node-2"])
    assert result.title == "Nothing needs you"
    assert result.body == (
        "Nothing needs you: no node is isolated and no alert is open.\n\nSpares left: 1 (node-2).\n"
    )
    assert "Spares" not in needs(spares=None).body


def test_nodes_on_which_a_container_stands_by_are_named():
    history = history_of()
    one_spare = attention("small", history, spares=["node-2"], warm=["node-2"])
    assert "Spares left: 1 (node-2). Warm spare on node-2.\n" in one_spare.body
    two = attention("small", history, spares=None, warm=["n3", "n4"])
    assert "\n\nWarm spares on n3 and n4.\n" in two.body


def test_an_isolated_node_is_to_be_mended_and_released():
    isolating = (over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"), started(2))
    result = needs(*isolating, spares=["node-3"])
    assert result.title == "1 thing needs you"
    assert "`perdure nodes small --release node-1`" in result.body
    assert "native\\_crash: SIGKILL" in result.body
    two_needs = needs(*isolating, spares=[])
    assert two_needs.title == "2 things need you"
    assert "### No spare is left" in two_needs.body


def test_a_run_that_waits_for_a_node_says_so():
    result = needs(over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"), spares=[])
    assert result.title == "2 things need you"
    assert "### The run waits for a node" in result.body


def test_a_job_that_asks_for_no_spare_is_not_told_that_none_is_left():
    assert attention("small", replay(BEGINNING), spares=[]).title == "Nothing needs you"


def test_an_open_alert_needs_somebody_and_a_past_one_does_not():
    result = needs(*seen(HOT), spares=["node-2"])
    assert "Alert: memory\\_high" in result.body
    assert "Look at node-1, device 3" in result.body
    assert needs(*seen(HOT), over(), decided(), spares=["node-2"]).title == "Nothing needs you"


def test_a_failed_run_names_what_to_do():
    fault = Fault(FaultClass.USER_CODE_ERROR, 0.0, "x", action="Fix the program.")
    end = RunEnded(**NOW, outcome="failed", message="user code")
    result = needs(over(fault=fault), decided(1, Rung.STOP), end, spares=[])
    assert result.title == "1 thing needs you", "an ended run needs no spare"
    assert "### The run has failed" in result.body
    assert "Fix the program. Then `perdure run JOB.yaml`" in result.body


def test_spares_are_healthy_nodes_that_the_run_does_not_use():
    nodes = ["node-0", "node-1", "node-2", "node-3"]
    isolating = (over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-3"))
    assert spares_of(nodes, history_of(*isolating)) == ["node-2"]


def test_each_need_is_there_by_itself_in_plain_text():
    isolating = (over(), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"), started(2))
    isolated, spare = needs(*isolating, spares=[]).needs
    assert (isolated.kind, isolated.node, isolated.title) == (
        NeedKind.ISOLATED,
        "node-1",
        "Node node-1 is isolated",
    )
    assert "native_crash: SIGKILL" in isolated.why
    assert isolated.action.endswith("then `perdure nodes small --release node-1`")
    assert spare.kind is NeedKind.NO_SPARE
