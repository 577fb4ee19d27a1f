"""The report of a fault, with answers to seven questions in the order in which people ask them.

The answers come from the ledger alone and are made again when it grows: a recovery that is not over
says so. The stacks of a hang are a report of their own, beside the logs of the attempt in the
store. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perdure.storage.objects import ObjectStore
from perdure.training.journal.attempt_view import AttemptView, InProcessRecovery
from perdure.training.journal.history import RunHistory
from perdure.training.journal.records import AttemptEnded
from perdure.training.liveness.culprit import find_standstill
from perdure.training.recovery.fault_names import name_fault
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.rungs import RUNGS, Decision, Rung
from perdure.training.reporting.ettr import duration_text
from perdure.training.reporting.markdown import (
    block,
    clock_text,
    code,
    counted,
    link,
    listed,
    text,
    with_commands,
)
from perdure.training.reporting.rows import RECOVERING, event_text, outcome_of
from perdure.training.wire.agent import NodeLog
from perdure.training.wire.logs import logs_prefix
from perdure.training.wire.rank_snapshot import RankSnapshot

QUESTIONS = (
    "What broke?",
    "Where?",
    "What was done?",
    "What did it cost?",
    "Is it over?",
    "Must somebody act?",
    "Where are the logs?",
)
HANG_REPORT = "hang.txt"
SUB_HEALTHY_TEXT = "The job is sub-healthy: the same link may break again."
OVER, UNDER_WAY, NOT_MENDED = "over", "under way", "not mended"

Stacks = Iterable[tuple[str, NodeLog]]


@dataclass(frozen=True, slots=True)
class ReportPlace:
    """The facts of a report from outside the ledger.

    Attributes:
        run_id: for the commands in the report.
        url: returns the address of an object in the run's store.
        waits: whether the run waits for a healthy node.
    """

    run_id: str
    url: Callable[[str], str]
    waits: bool = False


@dataclass(frozen=True, slots=True)
class FaultReport:
    """A report as the UI shows it.

    Attributes:
        name: unique within the run.
        title: the fault, its answer, and whether it is over; cards cut off the end.
        body: markdown.
    """

    name: str
    title: str
    body: str


def fault_reports(history: RunHistory, place: ReportPlace, *, recent: int) -> list[FaultReport]:
    """Build the reports that may still change: of the newest attempts, and of isolated nodes.

    Args:
        history: the ledger's content.
        place: for commands and addresses.
        recent: number of the newest attempts.
    """
    first = len(history.attempts) - recent
    reports: list[FaultReport] = []
    for index, view in enumerate(history.attempts):
        isolates = view.decision is not None and view.decision.isolate is not None
        if index >= first:
            reports += [
                _recovery_report(history, index, recovery, place) for recovery in view.recoveries
            ]
        ended = view.ended
        if ended is None or ended.fault is None or not ended.is_fault:
            continue
        if index >= first or isolates:
            reports.append(_attempt_report(history, index, ended, ended.fault, place))
    return reports


def _attempt_report(
    history: RunHistory, index: int, ended: AttemptEnded, fault: Fault, place: ReportPlace
) -> FaultReport:
    """Build the report of a fault that ended an attempt."""
    view = history.attempts[index]
    over, word = _over(history, index, waits=place.waits)
    is_over = word == OVER
    decision = view.decision
    answers = (
        _cause(fault),
        _where(view, fault),
        _done(decision) + _healed(view),
        _cost(history, index, ended),
        over,
        _act(history, fault, decision, place, is_over=is_over),
        _logs(history, view, fault, place),
    )
    saved = view.last_save
    note = f"\n{text(_sentence(event_text(saved)))}\n" if saved is not None else ""
    placement, attempt = view.key
    return FaultReport(
        f"fault-p{placement}-a{attempt}",
        _title(fault, decision, word),
        _body(answers, fault, decision) + note + _less_likely(ended.runners_up),
    )


def _recovery_report(
    history: RunHistory, index: int, recovery: InProcessRecovery, place: ReportPlace
) -> FaultReport:
    """Build the report of a fault that processes of the attempt survived."""
    view = history.attempts[index]
    fault, decision = recovery.began.fault, recovery.began.decision
    outcome = outcome_of(view, recovery)
    answers = (
        _cause(fault),
        f"{_where(view, fault)}, generation {recovery.began.generation}",
        _done(decision),
        _cost_inside(recovery),
        _over_inside(view, recovery),
        _act(history, fault, decision, place, is_over=recovery.succeeded),
        _logs(history, view, fault, place),
    )
    placement, attempt = view.key
    return FaultReport(
        f"fault-p{placement}-a{attempt}-r{recovery.began.number}",
        _title(fault, decision, outcome),
        _body(answers, fault, decision),
    )


def _body(answers: Sequence[str], fault: Fault, decision: Decision | None) -> str:
    # No table: the UI does not fold a table's cells (3.8.8), and cuts off long ones.
    pairs = zip(QUESTIONS, answers, strict=True)
    parts = [
        *(f"**{question}** {answer}\n\n" for question, answer in pairs),
        f"## Evidence\n\n{block(fault.evidence)}",
    ]
    if fault.explanation:
        parts.append(f"\n{with_commands(fault.explanation)}\n")
    if decision is not None and decision.skipped:
        rows = "".join(f"- {text(reason)}\n" for reason in decision.skipped)
        parts.append(f"\n## Cheaper answers that were not possible\n\n{rows}")
    return "".join(parts)


def _title(fault: Fault, decision: Decision | None, state: str) -> str:
    rung = f" -> {decision.rung}" if decision is not None else ""
    step = f", step {fault.step}" if fault.step is not None else ""
    return f"{fault.fault_class}{rung} ({state}): {fault.where}{step}"


def _cause(fault: Fault) -> str:
    """Answer what broke."""
    name = code(fault.fault_class)
    has_code = fault.code is not None and fault.code.lower() != fault.fault_class
    with_code = f"{name}, code {code(fault.code)}" if has_code else name
    blame = (("the program", fault.user_fault), ("hardware", fault.hardware_fault))
    causes = listed([party for party, holds in blame if holds])
    cause = f"; the cause lies in {causes}" if causes else ""
    line = fault.evidence.strip().splitlines()
    known_as = f"{with_code}: {text(name_fault(fault).text)}{cause}"
    return f"{known_as}: {code(line[-1][:200])}" if line else known_as


def _where(view: AttemptView, fault: Fault) -> str:
    device = f", device {fault.device}" if fault.device is not None else ""
    step = f", after step {fault.step}" if fault.step is not None else ""
    at = f"{clock_text(fault.at_s)} UTC"
    return f"{text(fault.where)}{device}, attempt {'{}.{}'.format(*view.key)}{step}, at {at}"


def _done(decision: Decision | None) -> str:
    if decision is None:
        return "Nothing yet: it is being decided"
    isolated = f" Node **{text(decision.isolate)}** is isolated." if decision.isolate else ""
    spent_on = RUNGS[decision.rung].spent_on
    meaning = f" ({text(spent_on)})" if spent_on else ""
    return f"{code(decision.rung)}{meaning}: {text(decision.reason)}.{isolated}"


def _healed(view: AttemptView) -> str:
    """Say how the node healed its chips before, and whether that sufficed."""
    healed = view.healed
    if healed is None:
        return ""
    failed = "" if healed.succeeded else f" {code(healed.rung)} was tried first and failed."
    return f"{failed} {text(_sentence(healed.text))}"


def _cost(history: RunHistory, index: int, ended: AttemptEnded) -> str:
    """Count the steps, seconds and spares of a recovery that needed a new attempt."""
    fault_s = ended.fault.at_s if ended.fault is not None else ended.at_s
    next_trained = _next_that_trains(history, index)
    parts = []
    if next_trained is None and history.ended is not None:
        parts.append("nothing was trained after it")
    elif next_trained is None:
        parts.append("not known before it is over")
    else:
        # A checkpoint of an end of life may be newer than the last step that was reported.
        lost = max(0, (ended.to_step or 0) - next_trained.from_step)
        parts.append(f"{counted(lost, 'step')} done again")
        assert next_trained.first_step is not None  # noqa: S101 it trains
        parts.append(
            f"{duration_text(next_trained.first_step.stepped_s - fault_s)} without training"
        )
    parts.append(_spare(history, index))
    return ", ".join(parts)


def _spare(history: RunHistory, index: int) -> str:
    """Say which node took the place of which."""
    view = history.attempts[index]
    next_number = history.attempts[index + 1].key[0] if index + 1 < len(history.attempts) else None
    later = [placement for placement in history.placements if placement.placement > view.key[0]]
    if not later or next_number == view.key[0]:
        return "no spare used"
    previous = {member.index: member.node for member in view.members}
    moved = [
        f"{member.node} in place of {previous[member.index]}"
        for member in later[0].members
        if previous.get(member.index, member.node) != member.node
    ]
    return f"spare used: {text(listed(moved))}" if moved else "no spare used"


def _cost_inside(recovery: InProcessRecovery) -> str:
    ended = recovery.ended
    if ended is None:
        return "not known before it is over"
    took = duration_text(ended.duration_s)
    if not ended.succeeded:
        return f"{took} until it had failed"
    parts = [f"{counted(ended.steps_lost, 'step')} done again", f"{took} without training"]
    for deed, ranks in (
        ("a new process for", ended.replaced),
        ("state from a replica for", ended.repaired),
    ):
        if ranks:
            noun = "rank" if len(ranks) == 1 else "ranks"
            parts.append(f"{deed} {noun} {listed(list(map(str, ranks)))}")
    return ", ".join(parts)


def _over(history: RunHistory, index: int, *, waits: bool) -> tuple[str, str]:
    """Say whether training goes on after an attempt: in a sentence, and in a word."""
    next_trained = _next_that_trains(history, index)
    if next_trained is not None and next_trained.first_step is not None:
        name, first = "{}.{}".format(*next_trained.key), next_trained.first_step
        goes_on = f"attempt {name} trains from step {next_trained.from_step}"
        return f"Yes, since {clock_text(first.stepped_s)} UTC: {goes_on}", OVER
    later = history.attempts[index + 1 :]
    if history.ended is not None:
        outcome = history.ended.outcome
        return f"No, the run was {'given up' if outcome == 'failed' else outcome} first", NOT_MENDED
    if later:
        return f"Not yet: attempt {'{}.{}'.format(*later[-1].key)} is starting", UNDER_WAY
    decision = history.attempts[index].decision
    if decision is not None and decision.rung is Rung.STOP:
        return "No, the run stops", NOT_MENDED
    if waits:
        return "Not yet: the run waits for a healthy node", UNDER_WAY
    return "Not yet: the recovery is under way", UNDER_WAY


def _over_inside(view: AttemptView, recovery: InProcessRecovery) -> str:
    ended = recovery.ended
    if ended is None:
        if outcome_of(view, recovery) == RECOVERING:
            return "Not yet: the recovery is under way"
        return "No, the attempt ended first; its own report goes on"
    if not ended.succeeded:
        return f"No, it failed: {text(ended.why)}"
    mark = f". {SUB_HEALTHY_TEXT}" if recovery.is_sub_healthy else ""
    return f"Yes, since {clock_text(ended.at_s)} UTC: training goes on from step {ended.step}{mark}"


def _act(
    history: RunHistory,
    fault: Fault,
    decision: Decision | None,
    place: ReportPlace,
    *,
    is_over: bool,
) -> str:
    """Say whether somebody has to act, and how."""
    stops = decision is not None and decision.rung is Rung.STOP
    if stops:
        advice = with_commands(fault.action) if fault.action else "Mend the cause."
        return f"Yes: {advice} Then start the run again: {code('perdure run JOB.yaml')}"
    node = decision.isolate if decision is not None else None
    if node is not None and node in history.isolated:
        command = code(f"perdure nodes {place.run_id} --release {node}")
        waits = place.waits and not is_over
        when = "now: the run waits for a node" if waits else "but it can wait"
        deed = "repaired" if fault.hardware_fault else "checked"
        return f"Yes, {when}. Have {text(node)} {deed}, then let it back in: {command}"
    if node is not None:
        return f"No. {text(node)} was released"
    if history.ended is not None and not is_over and not history.ended_well:
        return f"Only if the run is to go on: {code('perdure run JOB.yaml')}"
    return "No" if is_over else "Not now. If the recovery fails, this report will say what to do"


def _logs(history: RunHistory, view: AttemptView, fault: Fault, place: ReportPlace) -> str:
    name = "{}.{}".format(*view.key)
    option = f" --rank {fault.rank}" if fault.rank is not None else ""
    if history.is_launcher:  # all ranks of a node share a log
        option = f" --node {fault.node}" if fault.node is not None else ""
    command = code(f"perdure logs {place.run_id} --attempt {name}{option}")
    if view.ended is None:
        return f"{command}, once the attempt has ended"
    return f"{command}; in the store: {link(place.url(logs_prefix(place.run_id, *view.key)))}"


def _next_that_trains(history: RunHistory, index: int) -> AttemptView | None:
    later = history.attempts[index + 1 :]
    return next((view for view in later if view.first_step is not None), None)


def _less_likely(runners_up: Sequence[Fault]) -> str:
    if not runners_up:
        return ""
    rows = "".join(
        f"- {text(fault.fault_class)}: {code(fault.evidence[:200])}\n" for fault in runners_up
    )
    return f"\n## Less likely\n\n{rows}"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}{'' if words.endswith('.') else '.'}" if words else ""


def save_hang_report(
    store: ObjectStore,
    run_id: str,
    attempt: tuple[int, int],
    stacks: Stacks,
    progress: Sequence[RankSnapshot],
) -> str:
    """Save the stacks of all ranks in a hang, and say where they are.

    Args:
        store: the run's.
        run_id: for the command that prints them.
        attempt: placement and attempt.
        stacks: every process's, with its node.
        progress: every rank's; the headline comes from it.

    Raises:
        StorageError: they could not be saved.
    """
    key = f"{logs_prefix(run_id, *attempt)}{HANG_REPORT}"
    cause = find_standstill(tuple(progress))
    lines = [cause.line, *cause.ranks] if cause is not None else []
    printed = [f"{log.name} on {node}\n{log.text.rstrip()}" for node, log in stacks]
    report = "\n\n".join(["\n".join(lines), *printed]) + "\n"
    store.put(key, report.encode())
    placement, number = attempt
    command = f"perdure logs {run_id} --attempt {placement}.{number} --file {HANG_REPORT}"
    return f"Stacks of all ranks: {key}. '{command}' prints them."
