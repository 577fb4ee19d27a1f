"""What came of drills, for a person: a row each."""

from __future__ import annotations

from training.drill.verdict import Outcome


def row_of(one: Outcome) -> dict[str, str]:
    """One drill, by the headings of its table."""
    return {
        "drill": one.name,
        "injected": one.injected,
        "detected s": _seconds(one.detected_s),
        "rung": " ".join(one.rungs) or "-",
        "recovered s": _seconds(one.recovered_s),
        "steps lost": str(one.steps_lost),
        "curve equal": _curve(one),
        "left over": str(one.left_over),
        "as expected": "yes" if one.as_expected else "NO",
    }


def line_of(one: Outcome) -> str:
    """One drill in a line, without its name."""
    if not one.as_expected:
        return "; ".join(one.problems)
    rungs = ", ".join(one.rungs) or "nothing to mend"
    return (
        f"{rungs}: detected after {_seconds(one.detected_s)} s, recovered after "
        f"{_seconds(one.recovered_s)} s, {one.steps_lost} steps lost, curve equal: {_curve(one)}"
    )


def _curve(outcome: Outcome) -> str:
    if not outcome.curve_equal:
        return "no"
    return "yes" if outcome.differs_from is None else f"up to step {outcome.differs_from - 1}"


def _seconds(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"
