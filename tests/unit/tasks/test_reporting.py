"""Reports to the Prefect server: they never delay a run, and none is lost while it goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from perdure.storage.errors import StorageError, TimedOut
from perdure.tasks import reporting
from perdure.tasks.reporting import NotYet, Reporter, is_final, labels_of
from perdure.training.journal.events import StepRecord
from perdure.training.recovery.faults import FaultClass
from perdure.training.reporting.rows import (
    activity_of,
    event_text,
    progress_text,
)
from tests.unit.journal.histories import (
    CRASH_FAILED,
    DAMAGED,
    GOES_ON,
    LINK_BEGAN,
    LINK_RECOVERED,
    NOTICED,
    SAVED,
    SKIPPED,
    STANDS,
    history_of,
)


@pytest.fixture
def reporter(monkeypatch):
    monkeypatch.setattr(reporting, "RETRY_S", 0.01)
    reporter = Reporter("run", None, logging.getLogger("test"))
    reporter.start()
    yield reporter
    reporter.close()


def test_what_is_not_due_yet_is_sent_once_it_is_and_no_line_says_so(reporter, caplog, monkeypatch):
    monkeypatch.setattr(reporting, "NOT_YET_S", 0.01)
    sent, answers = threading.Event(), iter([False, False, True])

    def send() -> None:
        if not next(answers):
            raise NotYet("the task run has not ended on the server")
        sent.set()

    reporter.submit("state of a task run", send)
    assert sent.wait(240)
    assert caplog.text == ""


def test_what_the_server_did_not_take_is_sent_again_until_it_does(reporter, caplog):
    sent = threading.Event()
    refusals = iter([ConnectionError("down"), ConnectionError("down"), None])

    def send() -> None:
        refusal = next(refusals)
        if refusal is not None:
            raise refusal
        sent.set()

    reporter.submit("fault-p1-a1", send)
    assert sent.wait(240)
    assert caplog.text.count("does not take") == 1, "an outage is one line in the log"


def test_of_updates_to_the_same_artifact_only_the_newest_is_sent(reporter):
    busy, release, done = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []

    def occupy() -> None:
        busy.set()
        release.wait(240)

    reporter.submit("first", occupy)
    assert busy.wait(240)
    for number in range(5):
        reporter.submit("progress", lambda number=number: seen.append(number))
    reporter.submit("last", done.set)
    release.set()
    assert done.wait(240)
    assert seen == [4]


def refused(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server/api/artifacts")
    return httpx.HTTPStatusError(str(code), request=request, response=httpx.Response(code))


def failing(*errors: Exception, sent: threading.Event) -> Callable[[], None]:
    """Something to send that fails this often, and is sent then."""
    left = list(errors)

    def send() -> None:
        if left:
            raise left.pop(0)
        sent.set()

    return send


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimedOut("no answer"), "checkpoints waits for the run's store, retrying: no answer"),
        (refused(503), "the Prefect server does not take checkpoints, retrying: 503"),
        (ConnectionError("down"), "the Prefect server does not take checkpoints, retrying: down"),
        (KeyError("x"), "checkpoints cannot be made, retrying: 'x'"),
    ],
)
def test_what_could_not_be_sent_is_logged_with_what_failed(reporter, caplog, error, words):
    sent = threading.Event()
    reporter.submit("checkpoints", failing(error, sent=sent))
    assert sent.wait(240)
    assert words in caplog.text


def test_others_that_are_sent_meanwhile_do_not_repeat_the_line_of_an_outage(reporter, caplog):
    sent, others = threading.Event(), []
    send = failing(*[TimedOut("no answer")] * 5, sent=sent)

    def between() -> None:
        reporter.submit("progress", lambda: others.append(1))
        send()

    reporter.submit("checkpoints", between)
    assert sent.wait(240)
    assert len(others) >= 5, "nothing was sent in between"
    assert caplog.text.count("waits for the run's store") == 1
    again = threading.Event()
    reporter.submit("checkpoints", failing(TimedOut("no answer"), sent=again))
    assert again.wait(240)
    assert caplog.text.count("waits for the run's store") == 2, "the next outage is a line, too"


def test_what_the_server_always_refuses_is_dropped_with_one_line(reporter, caplog):
    tries: list[int] = []

    def send() -> None:
        tries.append(1)
        raise refused(422)

    for _ in range(3):
        done = threading.Event()
        reporter.submit("attempts", send)
        reporter.submit("last", done.set)
        assert done.wait(240)
    assert len(tries) == 3, "it was tried again without anything new"
    assert caplog.text.count("the Prefect server refuses attempts, not sent again: 422") == 1


@pytest.mark.parametrize(
    ("error", "final"),
    [(refused(code), code in (401, 404, 409, 422)) for code in (401, 404, 408, 409, 422, 429, 500)]
    + [(ObjectNotFound(http_exc=refused(404)), True), (httpx.ConnectTimeout("late"), False)]
    + [(StorageError("404"), False)],
)
def test_a_refusal_is_for_good_unless_another_time_may_be_better(error, final):
    assert is_final(error) is final


def test_of_events_in_an_outage_the_newest_wait_and_the_others_are_counted(
    reporter, monkeypatch, caplog
):
    monkeypatch.setattr(reporting, "MAX_EVENTS", 3)
    seen: list[int] = []
    monkeypatch.setattr(
        reporting, "emit_event", lambda *_, payload, **__: seen.append(payload["n"])
    )
    busy, release, done = threading.Event(), threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        release.wait(240)

    reporter.submit("first", occupy)
    assert busy.wait(240)
    reporter.submit("attempts", lambda: seen.append(-1))
    for number in range(8):
        reporter.event("checkpoint", {"n": number})
    reporter.submit("last", done.set)
    release.set()
    assert done.wait(240)
    assert seen == [-1, 5, 6, 7]
    assert caplog.text.count("events were never sent") == 1
    assert "5 events were never sent: more than 3 waited" in caplog.text


def test_closing_waits_for_a_server_that_is_down_for_a_bounded_time(monkeypatch, caplog):
    monkeypatch.setattr(reporting, "LAST_RETRY_S", 0.01)
    reporter = Reporter("run", None, logging.getLogger("test"))

    def send() -> None:
        raise ConnectionError("down")

    reporter.start()
    reporter.submit("attempts", send)
    reporter.close(0.2)
    reporter._thread.join(240)
    assert not reporter._thread.is_alive()
    assert "never sent: attempts" in caplog.text


def test_what_the_server_refused_once_while_closing_is_sent_all_the_same(monkeypatch):
    monkeypatch.setattr(reporting, "LAST_RETRY_S", 0.01)
    reporter = Reporter("run", None, logging.getLogger("test"))
    sent: list[int] = []
    refusals = iter([ConnectionError("locked"), ConnectionError("locked")])

    def send() -> None:
        for refusal in refusals:
            raise refusal
        sent.append(1)

    reporter.submit("attempts", send)  # before it starts: refused when it is closing already
    with reporter._wake:
        reporter._closing = True
    reporter.start()
    reporter.close()
    assert sent == [1]


LINES = {
    SKIPPED: "the batch of samples 96 to 104 is passed over at step 13: loss 4.5, "
    "gradient norm no number",
    SKIPPED.model_copy(
        update={"is_known": True}
    ): "the batch of samples 96 to 104 is passed over at step 13 once more: it was abnormal before",
    NOTICED: "the program: divides twice",
    DAMAGED: "checkpoint of step 40 is damaged and was set aside in favor of the previous one: "
    "rank 3's file",
    DAMAGED.model_copy(
        update={"is_repaired": True}
    ): "checkpoint of step 40 is damaged and was repaired from a node: rank 3's file",
    LINK_BEGAN: "recovery 1, generation 1: link_down at rank 3 on node-1: EI0006 -> step_retry",
    LINK_RECOVERED.model_copy(
        update={"steps_lost": 1}
    ): "recovery 1: training continues from step 14 after 0.62 s, 1 step repeated",
    LINK_RECOVERED: "recovery 1: training continues from step 14 after 0.62 s, 0 steps repeated",
    CRASH_FAILED: "recovery 2 failed: no replica of rank 1",
    SAVED: "end-of-life checkpoint of step 40 by ranks 0, 2",
    STANDS: "pause 4: every rank is paused at step 20",
    GOES_ON: "pause 4 is over: training continues from step 20",
}


@pytest.mark.parametrize(("event", "text"), LINES.items())
def test_every_note_is_a_line_of_the_log(event, text):
    assert event_text(event) == text


@pytest.mark.parametrize(
    ("events", "activity"),
    [
        ((), None),
        ((LINK_BEGAN,), "recovering: link_down -> step_retry"),
        ((LINK_BEGAN, LINK_RECOVERED), None),
        ((LINK_BEGAN, LINK_RECOVERED, STANDS), "paused at step 20 since 1970-01-01 00:00:20 UTC"),
        ((STANDS, GOES_ON), None),
    ],
)
def test_a_run_that_does_not_train_shows_what_it_does(events, activity):
    assert activity_of(history_of(*events)) == activity
    assert activity_of(history_of(*events, has_ended=True)) is None


def test_what_automations_can_ask_for_is_a_label_of_the_event():
    assert labels_of({"fault_class": FaultClass.HANG, "node": None, "evidence": "x"}) == {
        "perdure.fault_class": "hang"
    }


def test_the_progress_line_shows_step_loss_speed_and_ettr():
    last = StepRecord(15, 2.0, 1.0, 1e-3, 1e5, None, 0.0, 0.5, 8, 0, 1, 1)
    assert progress_text(last, 60, "training", ettr=0.914) == (
        "training, step 15 / 60, loss 2.0000, 100,000 tokens/s, ETTR 91.4%"
    )
    assert progress_text(None, 60, "starting") == "starting"
