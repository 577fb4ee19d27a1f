"""What the ladder would answer in one job: its policy, its engine and its layout put together."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.training.config.job import Job
from perdure.training.config.watch import HangAction
from perdure.training.diagnosis.recognise import recognise
from perdure.training.engines.registry import make_engine
from perdure.training.errors import InputError
from perdure.training.files import home_folder
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.repeated_fault import Terms
from perdure.training.supervisor.finishing import no_replica_of


def terms_of(job: Job) -> Terms:
    """What the answers in a job depend on.

    Raises:
        EngineError: the engine cannot be used.
    """
    engine = make_engine(job, home=home_folder(), epoch=0, secrets_env={}, created_s=0.0)
    restart = job.restart
    # As the coordinator has it, whose operations on a link are the runtime's, not HCCL's.
    inside = restart.policy(operator_retry=job.comm.link_retry)
    return Terms(
        policy=restart.policy(operator_retry=job.comm.op_retry.enabled),
        inside=None if job.worker.is_command else inside,
        supported=job.possible(engine.capabilities),
        nodes=job.engine.nodes,
        spares=job.engine.spares,
        no_replica=no_replica_of(job),
        unanswered=dict(_unanswered(job)),
    )


def _unanswered(job: Job) -> Iterator[tuple[FaultClass, str]]:
    """Classes that a clock finds, where the job has them only reported or not looked for."""
    if not job.restart.hang:
        yield FaultClass.HANG, "not looked for (restart.hang=false)"
    elif job.watch.hang_action is HangAction.ALERT:
        yield FaultClass.HANG, "an alert only (watch.hang_action=alert)"
    if not job.watch.isolate_fail_slow:
        yield FaultClass.FAIL_SLOW, "an alert only (watch.isolate_fail_slow=false)"


def fault_of_code(code: str) -> Fault:
    """The fault that the diagnosis makes of a chip's code, on the first device of a node.

    Raises:
        InputError: no table has the code.
    """
    code = code.upper().removeprefix("0X")
    line = f"fault code: {code}"
    match = recognise(line, "")
    if match is None or match.code != code:
        raise InputError("--code", f"{code!r} is no known code of a chip, such as 80E01801")
    return Fault(
        match.fault_class,
        0.0,
        line,
        node="node-0",
        rank=0,
        device=0,
        code=code,
        recoverable_by=match.recoverable_by,
        user_fault=match.user_fault,
        hardware_fault=match.hardware_fault,
    )
