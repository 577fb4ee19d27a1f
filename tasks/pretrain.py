"""The tasks of a pretraining run: one side effect each, idempotent.

`train` is one placement, and its Prefect retries are the in-place restarts; `attempt`,
nested in it, is one start of the processes with a bar of its own in the timeline. The failure hook
of `attempt` classifies the failure, asks the ladder, records the decision and names the state after
it; `train` reads the decision from the ledger, and its retry condition carries it out. States that
come from another run lose name and data in Prefect 3.8.8, so every task returns a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, cast

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.runtime import task_run as this_task_run
from prefect.tasks import Task

from perdure.tasks.credentials import credentials_of
from perdure.tasks.env_secrets import check_blocks
from perdure.tasks.state_names import name_state
from perdure.tasks.states import BY_PLATFORM, UNDECIDED, completed, data_of, failed
from perdure.tasks.supervision import Supervision
from perdure.training.config.job import Job
from perdure.training.config.recommendations import departures
from perdure.training.engines.base import Placement
from perdure.training.preflight.job import CheckedJob, check_job, start_warnings
from perdure.training.recovery.rungs import RUNGS, restarts_in_a_row
from perdure.training.reporting.action_items import waits_for_node
from perdure.training.reporting.markdown import counted
from perdure.training.supervisor.exit_zero import good_end_text
from perdure.training.supervisor.finishing import AttemptResult
from perdure.training.supervisor.watch import EndKind
from perdure.training.trainer.size import num_parameters
from perdure.training.wire.node import CheckOutcome

_checked_jobs: list[CheckedJob] = []


@contextmanager
def checked_already(checked: CheckedJob) -> Iterator[None]:
    """Have flow runs of this process rely on a check that it has made."""
    _checked_jobs.append(checked)
    try:
        yield
    finally:
        _checked_jobs.remove(checked)


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE)
def preflight(job: Job) -> CheckedJob:
    """Check everything that can be checked before the start, unless this process has done so.

    Raises:
        InputError: names field, value and what is allowed.
    """
    checked = next((checked for checked in _checked_jobs if checked.job == job), None)
    if checked is None:
        checked = check_job(job, read_credentials=lambda job: credentials_of(job.storage))
    check_blocks(job)
    logger = get_run_logger()
    for line in departures(job, num_parameters(job)):
        logger.warning("not as recommended: %s", line)
    for line in start_warnings(job):
        logger.warning(line)
    return checked


@task(name="place", cache_policy=NO_CACHE)
def place(supervision: Supervision) -> Placement:
    """Nodes and containers for the next attempt: the living ones, or new ones."""
    run = supervision.run
    waits = waits_for_node(run.history, spares=run.spares())
    finding = "waiting for a healthy node" if waits else "finding nodes, starting containers"
    supervision.story.show(finding)
    placement = supervision.run.place(stop_wanted=supervision.stop_wanted)
    history = supervision.run.refresh()
    avoid, last = history.isolated, history.placement.sub_healthy if history.placement else {}
    supervision.story.update()
    kept_out = f"; isolated: {', '.join(avoid)}" if avoid else ""
    named = "; ".join(f"{node} ({why})" for node, why in last.items())
    taken_last = f"; sub-healthy, taken last: {named}" if last else ""
    message = f"placement {placement.number} on {', '.join(placement.nodes)}{kept_out}{taken_last}"
    return completed(placement, message)


@task(name="check", cache_policy=NO_CACHE)
def check(supervision: Supervision, placement: Placement) -> bool:
    """Check the nodes of a placement before the first step. Returns whether it can be used."""
    supervision.story.show("checking nodes")
    verdict = supervision.run.check(placement)
    logger = get_run_logger()
    for node_check in verdict.checks:
        if node_check.outcome in (CheckOutcome.WARNING, CheckOutcome.FAILED):
            logger.warning(
                "%s: %s on %s: %s",
                node_check.outcome,
                node_check.name,
                node_check.node,
                node_check.seen,
            )
    for problem in verdict.common:
        logger.warning("no single node is to blame, the attempt will show: %s", problem)
    supervision.story.update()
    if not verdict.is_passed:
        reasons = "; ".join(f"{node}: {why}" for node, why in verdict.refused.items())
        return completed(False, f"isolated before the first step: {reasons}", name="NodesRefused")
    nodes = len({node_check.node for node_check in verdict.checks if node_check.node is not None})
    done = f"{counted(len(verdict.checks), 'check')} on {counted(nodes, 'node')}"
    return completed(True, done)


class RestartOptions(TypedDict):
    """The restart policy of a job, as options of the task of a placement."""

    retries: int
    retry_delay_seconds: float


def restart_options(job: Job) -> RestartOptions:
    """Retries: as many restarts in place as the policy allows in a row without progress.

    Progress makes restarts free, so a long run may use them up while the ladder still decides
    for a restart in place: the flow then goes on with a further task on the same placement.
    """
    policy = job.restart.policy(operator_retry=job.comm.op_retry.enabled)
    return RestartOptions(
        retries=restarts_in_a_row(policy), retry_delay_seconds=job.restart.delay_s
    )


def may_restart_in_place(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether the decision in the failed state is one that the same containers carry out.

    Must be a plain function: Prefect 3.8.8 takes anything else for "never retry".
    """
    return isinstance(state.data, AttemptResult) and state.data.restarts_in_place


def decide(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> None:
    """Decide about an attempt that has failed, and name its state after the decision."""
    # Not `state.data`, which is the record of a result by now (3.8.8).
    if not isinstance(state.result(raise_on_failure=False), AttemptResult):
        return  # the task itself raised: nothing is to be decided
    # Prefect gives a hook no arguments of its task (3.8.8).
    supervision: Supervision = this_task_run.parameters["supervision"]
    verdict = _conclude(supervision)
    if verdict.decision is not None:
        _name_after_decision(supervision, state, verdict)


def _conclude(supervision: Supervision) -> AttemptResult:
    """Have the attempt that was watched on record and published, once for all callers."""
    verdict = supervision.run.conclude(supervision.stop_wanted)
    text = _state_text(verdict) if verdict.decision is not None else None
    supervision.story.attempt_ended(text, log=get_run_logger())
    return verdict


def _name_after_decision(
    supervision: Supervision, state: State[Any], verdict: AttemptResult
) -> None:
    """Name a state after the decision, here and, once the server has it, on the server."""
    task_run_id = state.state_details.task_run_id
    assert task_run_id is not None  # noqa: S101 Prefect has set the state
    named = cast("State[Any]", _state_of(verdict))
    state.name, state.message = named.name, named.message
    name_state(supervision.story.reporter, task_run_id, named)


@task(name="train", cache_policy=NO_CACHE, retry_condition_fn=may_restart_in_place)
def train(
    supervision: Supervision, placement: Placement, data_manifest_key: str | None
) -> AttemptResult:
    """Train on one placement; a retry of this task is an in-place restart.

    Its retries and their delay are the job's restart policy, see `restart_options`.
    """
    tries: int = this_task_run.run_count
    context = TaskRunContext.get()
    supervision.story.placement_task = context.task_run if context is not None else None
    supervision.retry_delay.over()
    if tries == 1:  # before a retry, Prefect has waited
        supervision.run.wait_to_restart(placement, supervision.stop_wanted)
    history = supervision.run.refresh()
    if history.open_attempt is None and history.attempts and supervision.stop_wanted():
        return _state_of(supervision.run.stopped())
    number = len(history.attempts_in(placement.number))
    adopted = history.open_attempt is not None
    name = f"attempt {placement.number}.{number if adopted else number + 1}"
    step = f" from step {history.committed_step}"
    named = attempt.with_options(task_run_name=name + (" (adopted)" if adopted else step))
    with supervision.run.termination.deferred():
        state = named(supervision, placement, data_manifest_key, return_state=True)
        verdict = data_of(state)
        if state.is_failed():
            # Of the ledger, where the hook has decided.
            verdict = _conclude(supervision)
    supervision.run.leave_where_asked(verdict)
    if state.name == UNDECIDED:  # the hook could not decide
        _name_after_decision(supervision, state, verdict)
    if not verdict.restarts_in_place:
        return _state_of(verdict)
    if tries > restart_options(supervision.job)["retries"]:
        message = f"{_state_text(verdict)}; goes on in a task of its own"
        return completed(verdict, message, name="Continued")
    supervision.retry_delay.begin()
    return _state_of(verdict)


@task(name="attempt", cache_policy=NO_CACHE, on_failure=[decide])
def attempt(
    supervision: Supervision, placement: Placement, data_manifest_key: str | None
) -> AttemptResult:
    """Start the training processes, or adopt the living attempt, and watch it to its end.

    Its hook decides about a failure; `train` does where the hook could not.
    """
    adopted = supervision.run.refresh().open_attempt is not None
    supervision.story.show("watching an adopted attempt" if adopted else "starting processes")
    result = supervision.run.watch(
        placement,
        data_manifest_key=data_manifest_key,
        stop_wanted=supervision.stop_wanted,
        on_progress=supervision.story.on_progress,
    )
    if result.kind is EndKind.FAILED:
        return failed(result, f"ended{_at(result)}: the ladder is asked", name=UNDECIDED)
    return _state_of(_conclude(supervision))


def _state_of(verdict: AttemptResult) -> AttemptResult:
    if verdict.kind is EndKind.COMPLETED:
        steps = f"trained to step {verdict.step}" if verdict.step is not None else None
        return completed(verdict, good_end_text(steps, verdict.notes))
    if verdict.kind is EndKind.RESTARTED:
        return completed(verdict, f"restart.every_s, at step {verdict.step}", name="Restarted")
    if verdict.kind is EndKind.ENDED_FROM_OUTSIDE:
        return completed(verdict, f"ended by the platform{_at(verdict)}", name=BY_PLATFORM)
    if verdict.decision is None:
        return completed(verdict, "stopped on request", name="StoppedOnRequest")
    return failed(verdict, _state_text(verdict), name=RUNGS[verdict.decision.rung].state_name)


def _state_text(verdict: AttemptResult) -> str:
    assert verdict.fault is not None  # noqa: S101 a decision answers a fault
    assert verdict.decision is not None  # noqa: S101 a failed attempt has a decision
    healed = ""
    if verdict.healed is not None:
        failed = "" if verdict.healed.succeeded else f"; {verdict.healed.rung} failed"
        healed = f"{failed}; {verdict.healed.text}"
    return (
        f"{verdict.fault.fault_class} on {verdict.fault.where}{_at(verdict)}: "
        f"{verdict.decision.rung} ({verdict.fault.evidence[:160]}){healed}"
    )


def _at(verdict: AttemptResult) -> str:
    return f" at step {verdict.step}" if verdict.step is not None else ""


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def report(supervision: Supervision, outcome: str) -> None:
    """Publish tables, the loss and the timeline, in the UI and the store."""
    supervision.story.end(outcome)
