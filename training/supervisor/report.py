"""What is left to read after a run: the table of attempts, and the loss with its faults.

Rows come from the ledger, the curve from the step records in the store. Times are seconds.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.policy.history import AttemptView, RunHistory
from training.runtime.metrics import StepRecord


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One line of the table of attempts.

    Attributes:
        schedule_cnt: MA_SCHEDULE_CNT of each member, in order.
        proc_start_cnt: MA_PROC_START_CNT of each member, in order; empty until it ended.
        seconds_to_next_step: from the fault to the first step completed after it.
    """

    placement: int
    attempt: int
    nodes: str
    schedule_cnt: str
    proc_start_cnt: str
    from_step: int
    to_step: int | None
    outcome: str
    fault: str
    rung: str
    seconds_to_next_step: float | None


def attempt_rows(history: RunHistory) -> list[AttemptRow]:
    """The table of attempts, oldest first."""
    return [_row(view, history.attempts[i + 1 :]) for i, view in enumerate(history.attempts)]


def _row(view: AttemptView, later: Sequence[AttemptView]) -> AttemptRow:
    ended, fault = view.ended, view.ended.fault if view.ended is not None else None
    nodes = [member.node for member in view.members]
    counts = ended.proc_start_cnt if ended is not None else {}
    return AttemptRow(
        placement=view.started.placement,
        attempt=view.started.attempt,
        nodes=",".join(nodes),
        schedule_cnt=",".join(str(member.schedule_cnt) for member in view.members),
        proc_start_cnt=",".join(str(counts.get(node, "-")) for node in nodes) if ended else "",
        from_step=view.started.from_step,
        to_step=ended.to_step if ended is not None else None,
        outcome=ended.outcome if ended is not None else "running",
        fault=f"{fault.fault_class}: {_short(fault.evidence)}" if fault is not None else "",
        rung=view.decided.rung.value if view.decided is not None else "",
        seconds_to_next_step=_seconds_to_next_step(view, later),
    )


def _short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _seconds_to_next_step(view: AttemptView, later: Sequence[AttemptView]) -> float | None:
    if view.ended is None or view.ended.fault is None:
        return None
    steps = [a.first_step.stepped_s for a in later if a.first_step is not None]
    return round(steps[0] - view.ended.fault.at_s, 1) if steps else None


def effective_ratio(history: RunHistory, kept: Mapping[int, StepRecord], *, now_s: float) -> float:
    """ETTR: seconds spent on steps that were kept, over seconds since the run was created."""
    ended_s = history.ended.at_s if history.ended is not None else now_s
    wall_s = ended_s - history.created_s
    return sum(record.step_s for record in kept.values()) / wall_s if wall_s > 0 else 0.0


def loss_picture(history: RunHistory, kept: Mapping[int, StepRecord]) -> bytes:
    """The loss of every kept step with the faults marked, as PNG."""
    # The font cache makes this import slow, and most of a run does without it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(list(kept), [r.loss for r in kept.values()], color="#1f5fa8", linewidth=1.2)
    for view in history.attempts:
        fault = view.ended.fault if view.ended is not None else None
        if fault is None or view.decided is None:
            continue
        step = fault.step if fault.step is not None else view.started.from_step
        axes.axvline(step, color="#c0392b", linestyle="--", linewidth=1.0)
        axes.annotate(
            f"{fault.fault_class}\n{view.decided.rung}",
            xy=(step, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment="top",
            fontsize=8,
            color="#c0392b",
        )
    for seen in history.checkpoints:
        axes.axvline(seen.step, ymax=0.03, color="#2e7d32", linewidth=1.0)
    axes.set_xlabel("step (green marks: committed checkpoints)")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.set_title("Loss of every kept step; faults in red")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
