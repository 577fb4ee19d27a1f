"""What the ladder answers to one fault that comes again and again without progress.

Nothing is decided here: the fault is put before `decide`, the answer joins the history, and the
same fault comes again until the run stops. What is shown cannot differ from what a run does.

It comes a step later each time, but for classes whose rules are about one step; a node that was
isolated has left the job, so that the next fault is on another. Points in time are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.guards import ENDED
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import (
    IN_PROCESS,
    LADDER,
    RUNGS,
    Capacity,
    Decision,
    Policy,
    Recovery,
    Rung,
)

_FIRST_STEP = 100
_SAME_STEP = frozenset({FaultClass.DEVICE_OOM, FaultClass.NUMERIC_ANOMALY})
NO_SPARE = "no healthy spare is left"
NO_PART = "a command takes no part in it"


@dataclass(frozen=True, slots=True)
class Terms:
    """What the answers of one job depend on, besides the fault.

    Attributes:
        policy: once the processes have ended.
        inside: while some live; None: the program takes no part in that.
        supported: rungs that the engine can do.
        nodes: that the job runs on.
        spares: further ones.
        no_replica: why no other rank has the state of the one at fault, None when one may.
        unanswered: classes that never reach the ladder, each with what is done about them.
    """

    policy: Policy
    inside: Policy | None
    supported: frozenset[Rung]
    nodes: int
    spares: int
    no_replica: str | None = None
    unanswered: Mapping[FaultClass, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RungInARow:
    """One rung, as often as it is taken in a row.

    Attributes:
        rung: the recovery action.
        times: in a row.
        budget: how many the policy allows; None: no number of its own.
        isolates: whether the node of the fault is kept out from then on.
        saves_first: whether the survivors save what they hold before it.
        failed: why it could not be carried out, None when it could.
        reason: of the first of them.
    """

    rung: Rung
    times: int
    budget: int | None
    isolates: bool
    saves_first: bool
    failed: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """The answers to one fault, in order.

    Attributes:
        fault_class: of the fault.
        code: of the fault, None for the class alone.
        answers: up to the end of the run; none where the fault never reaches the ladder.
        never: rungs of the class that are not taken at all, each with why.
        unanswered: what is done about it where it never reaches the ladder, else None.
    """

    fault_class: FaultClass
    code: str | None
    answers: Sequence[RungInARow]
    never: Mapping[Rung, str]
    unanswered: str | None = None


def outlook(example: Fault, terms: Terms) -> Outlook:
    """What answers a fault like this one, time after time."""
    if example.fault_class in terms.unanswered:
        instead = terms.unanswered[example.fault_class]
        return Outlook(example.fault_class, example.code, (), {}, instead)
    answers: list[RungInARow] = []
    passed: dict[Rung, str] = {}
    for decision, failed in _decisions(example, terms):
        for skipped in decision.skipped:
            rung, _, why = skipped.partition(": ")
            passed.setdefault(Rung(rung), why)
        answers = _joined(answers, _answer(decision, failed, terms.policy))
    used = {answer.rung for answer in answers}
    never = {rung: why for rung, why in sorted(passed.items()) if rung not in used}
    return Outlook(example.fault_class, example.code, answers, never)


def outlooks(terms: Terms) -> Sequence[Outlook]:
    """One for each class of fault, on the first device of a node and with no code."""
    return [
        outlook(Fault(fault_class, 0.0, "", node="node-0", rank=0, device=0), terms)
        for fault_class in LADDER
    ]


def _decisions(example: Fault, terms: Terms) -> Iterator[tuple[Decision, str | None]]:
    """Each decision up to stop, and why it could not be carried out."""
    past: list[Recovery] = []
    fault, isolated = example, 0
    while True:
        came = len({recovery.fault.at_s for recovery in past})
        step = _FIRST_STEP if example.fault_class in _SAME_STEP else _FIRST_STEP + came
        node = example.node and f"node-{isolated}"
        fault = replace(example, at_s=float(came), node=node, step=step)
        failed: str | None = NO_SPARE
        while failed is not None:
            decision = _decide(fault, past, terms, isolated)
            lacks = decision.isolate is not None and isolated >= terms.spares
            failed = NO_SPARE if lacks else None
            yield decision, failed
            if decision.rung is Rung.STOP:
                return
            past.append(Recovery(fault, decision.rung, progressed=False, failed=lacks))
        isolated += decision.isolate is not None


def _decide(fault: Fault, past: Sequence[Recovery], terms: Terms, isolated: int) -> Decision:
    """As a run asks: first while processes live, then, where that helps nothing, without them."""
    capacity = Capacity(healthy=terms.nodes + terms.spares - isolated, needed=terms.nodes)

    def ask(policy: Policy, *, survivors: bool) -> Decision:
        return decide(
            fault,
            now_s=fault.at_s,
            history=past,
            supported=terms.supported,
            policy=policy,
            survivors=survivors,
            capacity=capacity,
            no_replica=terms.no_replica,
        )

    if terms.inside is None:
        ended = ask(terms.policy, survivors=False)
        passed = tuple(text.replace(f": {ENDED}", f": {NO_PART}") for text in ended.skipped)
        return replace(ended, skipped=passed)
    inside = ask(terms.inside, survivors=True)
    if inside.rung in IN_PROCESS:
        return inside
    ended = ask(terms.policy, survivors=False)
    why = dict(text.partition(": ")[::2] for text in ended.skipped)
    why |= dict(text.partition(": ")[::2] for text in inside.skipped)
    return replace(
        ended,
        skipped=tuple(f"{rung}: {text}" for rung, text in why.items()),
        end_of_life_checkpoint=inside.end_of_life_checkpoint,
    )


def _answer(decision: Decision, failed: str | None, policy: Policy) -> RungInARow:
    budget = RUNGS[decision.rung].budget
    return RungInARow(
        decision.rung,
        1,
        budget(policy) if budget is not None else None,
        decision.isolate is not None,
        decision.end_of_life_checkpoint,
        failed,
        decision.reason,
    )


def _joined(answers: list[RungInARow], new: RungInARow) -> list[RungInARow]:
    last = answers[-1] if answers else None
    if last is None or replace(new, times=last.times, reason=last.reason) != last:
        return [*answers, new]
    return [*answers[:-1], replace(last, times=last.times + 1)]


def outlook_markdown(rows: Sequence[Outlook]) -> str:
    """The answers as a Markdown table."""
    lines = ["| fault class | answers, in order | never, and why |", "|---|---|---|"]
    for row in rows:
        title = f"`{row.fault_class}`" + (f" {row.code}" if row.code else "")
        answers = row.unanswered or " -> ".join(map(_answer_text, row.answers))
        never = "; ".join(f"`{rung}`: {why}" for rung, why in row.never.items()) or "-"
        lines.append(f"| {title} | {answers} | {never} |")
    return "\n".join(lines)


def _answer_text(answer: RungInARow) -> str:
    times = f" x {answer.times}" if answer.times > 1 else ""
    failed = f" (fails: {answer.failed})" if answer.failed else ""
    return f"`{answer.rung}`{times}{failed}"
