"""Who answers a fault of a launched run: Perdure, or the platform that has given the nodes.

Two controllers that repair the same fault undo each other's work. Perdure acts inside the
allocation, and the platform once `perdure launch` has ended; its own mechanisms must be off. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perdure.training.config.job import Job
from perdure.training.platforms.checklist import FROM_PLATFORM
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.node import Check, CheckOutcome


@dataclass(frozen=True, slots=True)
class Share:
    """What the two do on some rungs.

    Attributes:
        rungs: of the ladder.
        perdure: does this.
        platform: does this, and no more.
    """

    rungs: tuple[Rung, ...]
    perdure: str
    platform: str


SHARES = (
    Share(
        (
            Rung.OPERATOR_RETRY,
            Rung.STEP_RETRY,
            Rung.PROCESS_REPLACE,
            Rung.IN_PLACE_RESTART,
            Rung.HANG_RESTART,
        ),
        "acts in the containers that are there",
        "nothing",
    ),
    Share(
        (Rung.NODE_REPLACE, Rung.POD_RESCHEDULE),
        "moves the member to a spare node; without one, it waits for the lost node "
        "(`restart.spare_wait_s`)",
        "may start `perdure launch` on the lost node again: a spare from then on",
    ),
    Share(
        (Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE),
        "starts new containers on the healthy nodes of the allocation",
        "nothing",
    ),
    Share(
        (Rung.STOP,),
        "ends `perdure launch` on all nodes, with an exit code",
        "starts the job again, and elsewhere, where the exit code asks for it",
    ),
)


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism of a platform that would answer faults of the run, too.

    Attributes:
        name: of its label, annotation or variable.
        off: values with which it does nothing.
        does: what it would do.
    """

    name: str
    off: frozenset[str]
    does: str


_OFF = frozenset({"", "off", "false", "0"})
_TASKD = "MindCluster's TaskD restarts processes, and replaces pods"
_MINDIO = "MindIO repairs inside the processes"
# Sources: MindCluster "Job YAML Configuration", and the variables that its ascend-operator sets
# for recover-strategy; ModelArts' training job annotations; MindSpeed-LLM "High Availability";
# MindFormers "Training High Availability".
MECHANISMS = (
    Mechanism("fault-scheduling", _OFF, "MindCluster deletes the pods of the job"),
    Mechanism("pod-rescheduling", _OFF, "MindCluster replaces pods"),
    Mechanism("recover-strategy", _OFF | {"exit"}, _TASKD),
    Mechanism("PROCESS_RECOVER", _OFF, _TASKD),
    Mechanism("ELASTIC_PROCESS_RECOVER_ENABLE", _OFF, _TASKD),
    Mechanism("ENABLE_RESTART_FAULT_PROCESS", _OFF, _TASKD),
    Mechanism("HIGH_AVAILABILITY", _OFF, _MINDIO),
    Mechanism("--enable-high-availability", _OFF, _MINDIO),
    Mechanism("MS_ENABLE_TFT", _OFF | {"{}"}, _MINDIO),
    Mechanism("fault-tolerance/hang-retry", _OFF, "ModelArts restarts a job that hangs"),
    Mechanism("fault-tolerance/pod-retry-num", _OFF, "ModelArts replaces pods"),
)


def shares_markdown() -> str:
    """Who acts on which rung, as a Markdown table."""
    lines = ["| rungs | Perdure | the platform |", "|---|---|---|"]
    for share in SHARES:
        rungs = ", ".join(f"`{rung}`" for rung in share.rungs)
        lines.append(f"| {rungs} | {share.perdure} | {share.platform} |")
    return "\n".join(lines)


def rivals(entries: Mapping[str, str]) -> Iterator[str]:
    """Describe the mechanisms of a platform that are on, among labels, annotations, variables."""
    for mechanism in MECHANISMS:
        text = entries.get(mechanism.name, "").strip()
        if text.lower() not in mechanism.off:
            yield f"{mechanism.name}={text}: {mechanism.does}"


def check_controllers(job: Job, environment: Mapping[str, str]) -> Check:
    """Check that the platform leaves the faults of a run to Perdure, as far as can be seen.

    Args:
        job: with the entries that its platform has, and the variables of its processes.
        environment: variables of this process, which are the platform's on a node of it.
    """
    variables = {**environment, **job.env}
    places = ((job.restart.from_platform, f" ({FROM_PLATFORM})"), (variables, " (variable)"))
    lines = [f"{line}{place}" for entries, place in places for line in rivals(entries)]
    return Check(
        name="controllers",
        outcome=CheckOutcome.WARNING if lines else CheckOutcome.OK,
        seen="; ".join(lines) or "no mechanism of the platform is on that can be seen from here",
        allowed="off on the platform: Perdure answers the fault",
    )
