"""What the terminal shows of a supervised run, on a wide one and on a narrow one."""

from __future__ import annotations

import io

from rich.console import Console

from perdure.panel import LiveView
from perdure.tables import attempts_view, sparkline
from perdure.tasks.observe import Observation
from perdure.training.reporting.rows import AttemptRow, event_text, story_rows
from tests.unit.journal.histories import (
    CRASH_BEGAN,
    CRASH_FAILED,
    GOES_ON,
    LINK_BEGAN,
    LINK_RECOVERED,
    STANDS,
    history_of,
)
from tests.unit.perdure.commands import shown

ROW = AttemptRow(
    1, 2, "node-0,node-1", "1,1", "2,2", 30, 77, "failed", "node_lost: the agent of node-1 is gone",
    "pod_reschedule", 11.0,
)  # fmt: skip


def attempts(width: int, rows=(ROW,)) -> str:
    return shown(attempts_view(list(rows), width), width)


def test_a_wide_terminal_shows_every_column_of_the_table():
    text = attempts(180)
    for word in ("MA_SCHEDULE_CNT", "MA_PROC_START_CNT", "from step", "to step", "s to next step"):
        assert word in text
    assert "pod_reschedule" in text


def test_a_narrow_terminal_shows_words_and_not_letters():
    words = " ".join(attempts(80).split())
    assert "attempt 1.2 on node-0,node-1" in words
    assert "MA_PROC_START_CNT 2,2" in words
    assert "steps 30 to 77" in words
    assert "-> pod_reschedule, 11.0 s to the next step" in words


def test_a_sparkline_has_the_asked_width_and_falls_with_the_loss():
    line = sparkline([float(10 - i // 10) for i in range(100)], 20)
    assert len(line) == 20
    assert (line[0], line[-1]) == ("█", "▁")


RECOVERED = history_of(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, CRASH_FAILED, has_ended=True)


def test_a_wide_terminal_shows_recoveries_inside_the_processes_as_generations():
    text = attempts(220, story_rows(RECOVERED))
    for words in (
        "1, generation 1",
        "step_retry",
        "1, generation 2",
        "process_replace (not recovered)",
    ):
        assert words in text


def test_a_narrow_terminal_shows_recoveries_below_their_attempt():
    lines = [line.rstrip() for line in attempts(120, story_rows(RECOVERED)).splitlines()]
    assert lines[2:] == [
        "  generation 1 on node-1 at step 14, link_down: EI0006 -> step_retry: recovered in 0.62 s",
        (
            "  generation 2 on node-0 at step 40, native_crash: SIGKILL -> process_replace: "
            "not recovered"
        ),
    ]


def observed(*histories_and_activities) -> str:
    """What a piped view prints of one look after the other."""
    console = Console(file=io.StringIO(), width=200)
    view = LiveView(console, ui_url="http://ui")
    for history, activity in histories_and_activities:
        view.observe(Observation("run", 100, activity, history))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_recovery_and_pause_is_printed_once():
    text = observed(
        (history_of(LINK_BEGAN), "recovering: link_down -> step_retry"),
        (history_of(LINK_BEGAN, LINK_RECOVERED), "training"),
        (history_of(LINK_BEGAN, LINK_RECOVERED, STANDS), "paused at step 20"),
        (history_of(LINK_BEGAN, LINK_RECOVERED, STANDS, GOES_ON), "training"),
    )
    assert text.splitlines() == [
        f"attempt 1.1: {event_text(LINK_BEGAN)}",
        "attempt 1.1: recovering: link_down -> step_retry",
        "attempt 1.1: recovery 1: training goes on from step 14 after 0.62 s, 0 steps done again",
        "attempt 1.1: training",
        "attempt 1.1: pause 4: every rank is paused at step 20",
        "attempt 1.1: paused at step 20",
        "attempt 1.1: pause 4 is over: training goes on from step 20",
        "attempt 1.1: training",
    ]
