"""The programs that are compared, and the targets of ours.

Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.recovery import nodes, ours, peers
from benchmarks.recovery.measuring import Recovery
from benchmarks.recovery.workload import Start
from perdure.training.config.drill import DrillKind

HCCE = "perdure step retry, HCCE"
UCE = "perdure step retry, UCE"
WARM = "perdure new process, warm"
COLD = "perdure new process, cold"
TORCHRUN = "torchrun --max-restarts"
TORCHFT = "torchft"
TORCHFT_SHORT = "torchft, 0.5 s heartbeat timeout"
IN_PROCESS = "nvrx in-process"
IN_PROCESS_SPARE = "nvrx in-process, spare rank"

NODE_WARM = "perdure node replace, warm spare"
NODE_COLD = "perdure node replace, cold spare"
NODE_TORCHRUN = "torchrun, spare agent"
NODE_TORCHRUN_SHORT = "torchrun, 1 s heartbeats"
NODE_FT = "ft_launcher, hot spare"
NODE_TORCHFT = "torchft, spares"
NODE_TORCHFT_SHORT = "torchft, 0.5 s heartbeats"

STEP_RETRY_STEPS = 5.0
WARM_BESIDE_TORCHRUN = 10.0
WARM_BESIDE_BEST = 3.0
# Relative; DDP sorts its buckets again after a restart, which moves the last digits.
SAME_LOSS = 1e-5


@dataclass(frozen=True, slots=True)
class Contender:
    """One row.

    Attributes:
        start: runs a workload to its end.
        undisturbed: name of the program whose run without a fault its loss is compared with.
    """

    start: Start
    undisturbed: str


OURS: Mapping[str, Contender] = {
    HCCE: Contender(ours.step_retry(DrillKind.COLLECTIVE), "perdure"),
    UCE: Contender(ours.step_retry(DrillKind.DEVICE_MEMORY), "perdure"),
    WARM: Contender(ours.replaced, "perdure"),
    COLD: Contender(ours.replaced_cold, "perdure"),
}
PEERS: Mapping[str, Contender] = {
    TORCHRUN: Contender(peers.torchrun, "torchrun"),
    TORCHFT: Contender(peers.replicas(), "torchft"),
    TORCHFT_SHORT: Contender(peers.replicas(*peers.SHORT_TIMEOUT), "torchft"),
    IN_PROCESS: Contender(peers.in_process, "nvrx"),
    IN_PROCESS_SPARE: Contender(peers.in_process_spare, "nvrx"),
}
NODE_OURS: Mapping[str, Contender] = {
    NODE_WARM: Contender(ours.node_replaced(warm_spares=1), "perdure"),
    NODE_COLD: Contender(ours.node_replaced(warm_spares=0), "perdure"),
}
NODE_PEERS: Mapping[str, Contender] = {
    NODE_TORCHRUN: Contender(nodes.torchrun(), "torchrun"),
    NODE_TORCHRUN_SHORT: Contender(nodes.torchrun(nodes.SHORT_KEEP_ALIVE), "torchrun"),
    NODE_FT: Contender(nodes.ft_launcher, "torchrun"),
    NODE_TORCHFT: Contender(nodes.torchft(), "torchft"),
    NODE_TORCHFT_SHORT: Contender(
        nodes.torchft(*peers.SHORT_TIMEOUT, collective_s=nodes.SHORT_COLLECTIVE_S), "torchft"
    ),
}
CONTENDERS: Mapping[str, Contender] = {**OURS, **PEERS}
UNDISTURBED: Mapping[str, Start] = {
    "perdure": ours.session(),
    "torchrun": peers.torchrun,
    "torchft": peers.replicas(),
    "nvrx": peers.in_process,
}


@dataclass(frozen=True, slots=True)
class Section:
    """Contenders that have the same fault.

    Attributes:
        kind: of its runs, as the command line knows it.
        title: of its table.
        ours: rows of ours.
        peers: rows of the others.
        loses_node: whether a whole node is killed.
        reference: the row of ours that is compared with the fastest peer of the same loss.
        limits: this row of ours, beside this other (None: the fastest peer), so many times as fast.
    """

    kind: str
    title: str
    ours: Mapping[str, Contender]
    peers: Mapping[str, Contender]
    loses_node: bool
    reference: str
    limits: Sequence[tuple[str, str | None, float]]

    @property
    def contenders(self) -> Mapping[str, Contender]:
        """All rows."""
        return {**self.ours, **self.peers}


RANK_KILLED = Section(
    kind="fault",
    title="from a fault to the next newly completed step",
    ours=OURS,
    peers=PEERS,
    loses_node=False,
    reference=WARM,
    limits=(
        (WARM, TORCHRUN, WARM_BESIDE_TORCHRUN),
        (WARM, None, WARM_BESIDE_BEST),
        (COLD, None, 1.0),
    ),
)
NODE_LOST = Section(
    kind="node",
    title="from the loss of a node to the next newly completed step",
    ours=NODE_OURS,
    peers=NODE_PEERS,
    loses_node=True,
    reference=next(iter(NODE_OURS)),
    limits=((NODE_WARM, None, 1.0), (NODE_COLD, NODE_TORCHRUN_SHORT, 1.0)),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A target of ours, and whether it is met."""

    text: str
    is_met: bool


def targets(section: Section, found: Mapping[str, list[Recovery]]) -> list[Target]:
    """All targets of a section whose contenders ran."""
    resume_s = {name: median(one.resume_s for one in all_) for name, all_ in found.items() if all_}
    best = min(
        resume_s.keys() & section.peers.keys(), key=lambda name: resume_s[name], default=None
    )
    results = []
    for name in (one for one in (HCCE, UCE) if one in resume_s):
        steps = median(one.resume_steps for one in found[name])
        text = f"{name} within {STEP_RETRY_STEPS:g} step times: {steps:.2f}"
        results.append(Target(text, steps <= STEP_RETRY_STEPS))
    for name, beside, limit in section.limits:
        other = beside or best
        if name in resume_s and other in resume_s:
            ratio = resume_s[other] / resume_s[name]
            text = f"{name} {limit:g} x as fast as {other}: {ratio:.2f} x"
            results.append(Target(text, ratio >= limit))
    ours = {name: runs for name, runs in found.items() if name in section.ours}
    return results + _without_loss(ours)


def _without_loss(ours: Mapping[str, list[Recovery]]) -> list[Target]:
    """What holds of every run of ours; one that never ran shows nothing."""
    if not ours or not all(ours.values()):
        never = ", ".join(name for name in ours if not ours[name]) or "none of them took part"
        texts = ("perdure loses no steps", "perdure's loss is the undisturbed one")
        return [Target(f"{text}: not known, never ran: {never}", is_met=False) for text in texts]
    lost = max(one.steps_lost for runs in ours.values() for one in runs)
    unequal = [name for name, runs in ours.items() for one in runs if one.difference]
    return [
        Target(f"perdure loses no steps: {lost}", lost == 0),
        Target(f"perdure's loss is the undisturbed one: {not unequal}", not unequal),
    ]


def beside_equal(section: Section, found: Mapping[str, list[Recovery]]) -> str:
    """Ours beside the fastest peer that continues with the same batch, hence the same loss."""
    equal = {
        name: median(one.resume_s for one in runs)
        for name, runs in found.items()
        if name in section.peers and runs and max(one.difference for one in runs) < SAME_LOSS
    }
    ours = section.reference
    if not equal or not found.get(ours):
        return "no peer continued with the same loss"
    best = min(equal, key=lambda name: equal[name])
    ratio = equal[best] / median(one.resume_s for one in found[ours])
    return f"the fastest peer whose loss stays the same is {best}: {ours} {ratio:.2f} x as fast"
