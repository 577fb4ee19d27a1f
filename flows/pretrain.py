"""The pretrain flow: the runbook of a run, with a Prefect task for each step.

One flow run per run; started again, it takes the run up where its ledger stops, and adopts the
attempt if it is still alive.

Annotations are evaluated here: a flow that is served goes to its process by value, with the names
that its code uses, and those of postponed annotations are not among them (3.8.8).
"""

from typing import Any, cast

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed
from typing_extensions import override

from perdure.tasks.entry import enter, finish_with, leave_with, left_to_other, name_of_flow_run
from perdure.tasks.following import follow, goes_on_following, may_follow
from perdure.tasks.hooks import leave_adoptable, take_down
from perdure.tasks.job_parameter import (
    JobParameter,
    Nodes,
    Steps,
    TemplateParameter,
    require_job,
)
from perdure.tasks.preparation import ensure_data, ensure_prepared
from perdure.tasks.pretrain import (
    check,
    place,
    preflight,
    report,
    restart_options,
    train,
)
from perdure.tasks.retry_delay import NotWanted
from perdure.tasks.states import BY_PLATFORM, FINAL_STATES, data_of
from perdure.tasks.story import CONTINUED
from perdure.tasks.supervision import Supervision, has_open_attempt
from perdure.training.config.job import Job, JobTemplate
from perdure.training.engines.base import Placement
from perdure.training.errors import AlreadySupervised, RunConflict
from perdure.training.files import home_folder
from perdure.training.preflight.job import CheckedJob
from perdure.training.reporting.summary import final_message
from perdure.training.supervisor.finishing import AttemptResult
from perdure.training.supervisor.run_identity import begin_store, completed_before
from perdure.training.supervisor.runbook import RunSteps, run_to_completion
from perdure.training.trainer.data.prepare import DataOutcome

# Without a default, a flow run without a job would crash before the flow can say what is wrong, and
# would be started again for that (3.8.8). Only a schedule can make one, see `require_job`.
NO_JOB = cast("JobTemplate", None)


@flow(
    name="pretrain",
    flow_run_name=name_of_flow_run,
    on_cancellation=[take_down],
    on_crashed=[leave_adoptable],
    persist_result=False,
    validate_parameters=False,  # `enter` does: one line that names field, value and what is allowed
)
def pretrain(
    job: TemplateParameter = NO_JOB, steps: Steps = None, nodes: Nodes = None
) -> State[Any]:
    """Pretrain until the target step is reached, whatever breaks on the way.

    Args:
        job: whole job, or the name of a Prefect Variable that holds it.
        steps: target step, in place of the job's.
        nodes: number of nodes, in place of the job's.
    """
    entered = enter({"job": job, "steps": steps, "nodes": nodes})
    if isinstance(entered, State):
        return finish_with(entered)
    end = follow(entered) if goes_on_following() else None
    while end is None:
        try:
            return _pretrain(entered)
        except AlreadySupervised:
            end = follow(entered) if may_follow() else left_to_other(entered)
        except RunConflict as conflict:
            end = Failed(message=str(conflict))
    return finish_with(end)


require_job(pretrain)


def _pretrain(job: Job) -> State[Any]:
    checked = CheckedJob.of_living_attempt(job) if has_open_attempt(job) else preflight(job)
    supervision = Supervision(checked, get_run_logger())
    try:
        end = _supervise(supervision)
    except KeyboardInterrupt:
        if not supervision.has_cancelled:
            raise  # Ctrl-C was for what serves the flow: the attempt goes on
        run, ettr = supervision.run, supervision.story.ettr
        # Prefect would call the flow run Crashed (3.8.8), but Ctrl-C has cancelled the run.
        text = final_message("cancelled with Ctrl-C", run.history, ettr=ettr)
        return Cancelled(message=text)
    if end.name == BY_PLATFORM:
        leave_with(end)
    return end


def _supervise(supervision: Supervision) -> State[Any]:
    with supervision:
        run, job = supervision.run, supervision.job
        if run.is_complete:
            return Completed(message=completed_before(job, run.history))
        end = run_to_completion(TaskSteps(supervision), log=supervision.logger)
        if end.outcome == "ended from outside":
            return FINAL_STATES[end.outcome](message=end.message)
        if supervision.retry_delay.was_cut_short:
            supervision.close_own()  # Prefect has set the placement to Crashed (3.8.8)
        # A picture that fails changes no outcome.
        report(supervision, end.outcome, return_state=True)
        text = final_message(end.message, run.history, ettr=supervision.story.ettr)
        return FINAL_STATES[end.outcome](message=text)


@flow(name="prepare-data", flow_run_name="{job.run_id}")
def prepare(job: JobParameter) -> None:
    """Prepare the corpus of a job, so that its run finds everything there."""
    checked = preflight(job)
    begin_store(checked.job, home_folder())
    ensure_data(checked.job)


class TaskSteps(RunSteps):
    """The steps of the runbook as Prefect tasks."""

    def __init__(self, supervision: Supervision) -> None:
        super().__init__(supervision.run, supervision.stop_wanted, supervision.story.on_progress)
        self.supervision = supervision

    @override
    def prepare_data(self) -> DataOutcome:
        self.supervision.story.show("preparing data")
        return ensure_data(self.run.job)

    @override
    def place(self) -> Placement:
        placed = self.run.history.placement
        name = f"place after {placed.placement}" if placed is not None else "place"
        named = place.with_options(task_run_name=name)
        return data_of(named(self.supervision, return_state=True))

    @override
    def check(self, placement: Placement) -> bool:
        named = check.with_options(task_run_name=f"check placement {placement.number}")
        return data_of(named(self.supervision, placement, return_state=True))

    @override
    def prepare(self, placement: Placement) -> None:
        ensure_prepared(self.supervision, placement)

    @override
    def train(self, placement: Placement, data_manifest_key: str | None) -> AttemptResult:
        history, number = self.run.history, placement.number
        name = f"placement {number} on {','.join(placement.nodes)}"
        if history.open_attempt is None and history.attempts_in(number):
            name += CONTINUED
        named = train.with_options(task_run_name=name, **restart_options(self.run.job))
        try:
            with self.supervision.retry_delay:
                state = named(self.supervision, placement, data_manifest_key, return_state=True)
        except NotWanted:
            self.stop_wanted()  # raises where another process supervises from now on
            return self.run.stopped()
        return data_of(state)
