"""What a person sees of the attempts, on a wide terminal and on a narrow one."""

from __future__ import annotations

import io

from rich.console import Console

from perdure.live import attempts_view, sparkline
from training.supervisor.report import AttemptRow

ROW = AttemptRow(
    1, 2, "node-0,node-1", "1,1", "2,2", 30, 77, "failed", "node_lost: the agent of node-1 is gone",
    "pod_reschedule", 11.0,
)  # fmt: skip


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(attempts_view([ROW], console.width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_wide_terminal_shows_every_column_of_the_table():
    text = shown(180)
    for word in ("MA_SCHEDULE_CNT", "MA_PROC_START_CNT", "from step", "to step", "s to next step"):
        assert word in text
    assert "pod_reschedule" in text


def test_a_narrow_terminal_shows_words_and_not_letters():
    words = " ".join(shown(80).split())
    assert "attempt 1.2 on node-0,node-1" in words
    assert "MA_PROC_START_CNT 2,2" in words
    assert "steps 30 to 77" in words
    assert "-> pod_reschedule, 11.0 s to the next step" in words


def test_a_sparkline_has_the_asked_width_and_falls_with_the_loss():
    line = sparkline([float(10 - i // 10) for i in range(100)], 20)
    assert len(line) == 20
    assert (line[0], line[-1]) == ("█", "▁")
