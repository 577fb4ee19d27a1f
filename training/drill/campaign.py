"""Campaigns: runs with many faults of all kinds, drawn from a seed or read from a file.

Whatever fault comes, the curve of the run equals that of the undisturbed one, and no process is
left over. A fault that did not fire has a reason, or the campaign proves too little. Steps are
completed optimizer steps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field, ValidationError

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint, Kill, Victim
from perdure.training.config.model import ParallelKind
from perdure.training.drill.job import NUM_RANKS
from perdure.training.errors import InputError
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import Rung

SAVE_EVERY_STEPS = 3
STEPS_PER_FAULT = 3
FIRST_STEP = 4  # before, nothing is saved that a restart could begin with
LINK_RETRY_EVERY = 2  # of so many seeds one has operator retry on
MORE_THAN_ONCE = 0.05  # share of faults that fire again when their step is executed again
HANG_TIMEOUT_S = 10.0
# A process that is not there at one poll may be about to start; at the next it is there.
ENOUGH_POLLS = 2
# The next container stands by some seconds after the one before was taken; polls are 0.2 s apart.
ENOUGH_POLLS_FOR_SPARE = 150

# Budgets are not what a campaign is about: its faults come too often for any.
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "checkpoint": {"every_steps": SAVE_EVERY_STEPS},
    "restart": {
        "max_restarts": 128,
        "in_place_retries": 128,
        "pod_retries": 128,
        "hang_timeout_s": HANG_TIMEOUT_S,
        "numeric_retry": True,
        "snapshot_every_steps": SAVE_EVERY_STEPS,
        "abnormal_loss": 1e3,
        "abnormal_grad_norm": 1e3,
    },
    "engine": {"spares": 16, "warm_spares": 1},
}

# A start that hangs would be another campaign for every seed: it has a drill of its own.
_ANYWHERE = tuple(point for point in DrillPoint if point is not DrillPoint.RESTORE)
# What is raised under a collective comes out of C++ as an error of another type.
_ABOVE_COLLECTIVES = tuple(point for point in _ANYWHERE if point is not DrillPoint.REDUCING)
_BEFORE_THE_OPTIMIZER = (
    DrillPoint.START,
    DrillPoint.BACKWARD,
    DrillPoint.PREPARED,
    DrillPoint.VOTED,
)
POINTS: Mapping[DrillKind, tuple[DrillPoint, ...]] = {
    DrillKind.KILL: _ANYWHERE,
    DrillKind.STOP: _ANYWHERE,
    DrillKind.DEVICE_MEMORY: _ABOVE_COLLECTIVES,
    DrillKind.COLLECTIVE: (*_BEFORE_THE_OPTIMIZER, DrillPoint.SAVE, DrillPoint.RECOVERY),
    DrillKind.LINK: _ANYWHERE,
    DrillKind.GRADIENT: (DrillPoint.BACKWARD,),
    DrillKind.NOT_A_NUMBER: (DrillPoint.BACKWARD,),
    DrillKind.EXCEPTION: _BEFORE_THE_OPTIMIZER,
    DrillKind.NODE: _ANYWHERE,
}
# How often each is drawn; those that cost a run many seconds, seldom.
_WEIGHTS: Mapping[DrillKind | Victim, int] = {
    DrillKind.KILL: 12,
    DrillKind.DEVICE_MEMORY: 10,
    DrillKind.COLLECTIVE: 10,
    DrillKind.LINK: 8,
    DrillKind.GRADIENT: 4,
    DrillKind.NOT_A_NUMBER: 2,
    DrillKind.STOP: 1,
    DrillKind.EXCEPTION: 1,
    DrillKind.NODE: 1,
    Victim.RANK: 4,
    Victim.CHECKPOINT_SERVER: 2,
    Victim.FORK_SERVER: 2,
    Victim.COORDINATOR: 1,
    Victim.AGENT: 1,
    Victim.NODE: 2,
    Victim.SPARE: 2,
}
# Without replicas these end the processes, every time.
_NEEDS_REPLICAS = frozenset({DrillKind.KILL, DrillKind.DEVICE_MEMORY, Victim.RANK})
_AT_MOST: Mapping[DrillKind | Victim, int] = {
    DrillKind.STOP: 1,
    DrillKind.EXCEPTION: 1,
    DrillKind.NODE: 2,
    Victim.COORDINATOR: 1,
    Victim.AGENT: 1,
    Victim.NODE: 2,
    Victim.SPARE: 2,
}


class Campaign(FrozenModel):
    """The faults of one run."""

    seed: int = Field(0, description="that it was drawn from")
    parallelism: ParallelKind = Field(ParallelKind.DDP, description="of the job")
    steps: int = Field(ge=1, description="target step of the job")
    overrides: dict[str, dict[str, Any]] = Field({}, description="fields of the job, by section")
    faults: tuple[DrillFault, ...] = Field((), description="made in the worker processes")
    kills: tuple[Kill, ...] = Field((), description="made from outside")

    @property
    def size(self) -> int:
        """Number of faults and kills."""
        return len(self.faults) + len(self.kills)

    @property
    def starts(self) -> int:
        """How often the run has to be started: the program's own errors stop it."""
        return 1 + sum(fault.times for fault in self.faults if fault.kind is DrillKind.EXCEPTION)

    def only(self, chosen: Collection[int]) -> Campaign:
        """The same with some of its faults and kills, by their index among all of them."""
        faults = tuple(fault for n, fault in enumerate(self.faults) if n in chosen)
        first = len(self.faults)
        kills = tuple(kill for n, kill in enumerate(self.kills, start=first) if n in chosen)
        return self.model_copy(update={"faults": faults, "kills": kills})


def draw(seed: int, *, num_faults: int, kind: ParallelKind, is_of_gloo: bool = True) -> Campaign:
    """A campaign out of a seed: the same seed, the same campaign.

    Args:
        seed: of the random numbers.
        num_faults: of the campaign, its kills included.
        kind: of parallelism.
        is_of_gloo: whether collectives run over gloo, whose connections break and whose beginning
            is a point of a step; those of devices are their library's.
    """
    rng = Random(seed)  # noqa: S311 nothing here is secret
    steps = FIRST_STEP + num_faults * STEPS_PER_FAULT + SAVE_EVERY_STEPS
    possible = [cause for cause in _WEIGHTS if is_of_gloo or cause is not DrillKind.LINK]
    weights = {cause: _weight(cause, kind) for cause in possible}
    faults: list[DrillFault] = []
    kills: list[Kill] = []
    drawn: Counter[DrillKind | Victim] = Counter()
    while len(faults) + len(kills) < num_faults:
        cause = rng.choices(list(weights), list(weights.values()))[0]
        drawn[cause] += 1
        if drawn[cause] > _AT_MOST.get(cause, num_faults):
            continue
        step = rng.randrange(FIRST_STEP, steps - SAVE_EVERY_STEPS)
        if isinstance(cause, Victim):
            # Of a node there are as many as ranks on one: two members, four ranks.
            index = rng.randrange(NUM_RANKS if cause is Victim.RANK else 2)
            kill = Kill(victim=cause, index=index, step=step)
            if kill not in kills:  # the second one would find nothing
                kills.append(kill)
        else:
            points = [
                point for point in POINTS[cause] if is_of_gloo or point is not DrillPoint.REDUCING
            ]
            faults.append(_draw_fault(rng, cause, step, points))
    return Campaign(
        seed=seed,
        parallelism=kind,
        steps=steps,
        overrides={
            **{section: dict(fields) for section, fields in _OVERRIDES.items()},
            "comm": {"link_retry": is_of_gloo and seed % LINK_RETRY_EVERY == 0},
        },
        faults=tuple(sorted(faults, key=lambda fault: fault.step)),
        kills=tuple(sorted(kills, key=lambda kill: kill.step)),
    )


def _weight(cause: DrillKind | Victim, kind: ParallelKind) -> int:
    is_rare = kind is ParallelKind.FSDP2 and cause in _NEEDS_REPLICAS
    return 1 if is_rare else _WEIGHTS[cause]


def _draw_fault(
    rng: Random, kind: DrillKind, step: int, points: Sequence[DrillPoint]
) -> DrillFault:
    point = rng.choice(points)
    if point is DrillPoint.SAVE:
        step -= step % SAVE_EVERY_STEPS  # no other step is saved
    # An abnormal step that is abnormal again is accepted, and changes the curve.
    once = (DrillKind.GRADIENT, DrillKind.EXCEPTION)
    fires_twice = kind not in once and rng.random() < MORE_THAN_ONCE
    return DrillFault(
        kind=kind,
        rank=rng.randrange(NUM_RANKS),
        step=step,
        point=point,
        times=2 if fires_twice else 1,
    )


def read_campaign(path: Path) -> Campaign:
    """The campaign of a file.

    Raises:
        InputError: there is none.
    """
    try:
        return Campaign.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError("--campaign", f"{str(path)!r}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError("--campaign", f"{str(path)!r}: {place}: {first['msg']}") from error
    except ValueError as error:
        raise InputError("--campaign", f"{str(path)!r}: is not JSON: {error}") from error


def write_campaign(path: Path, campaign: Campaign) -> None:
    """Keep a campaign, to be run again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(campaign.model_dump_json(indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Unfired:
    """A fault that did not fire.

    Attributes:
        description: description for reports.
        reason: why it could not fire, None when there is none.
    """

    description: str
    reason: str | None


def unfired(
    campaign: Campaign,
    history: RunHistory,
    *,
    fired: Collection[int],
    killed: Collection[int],
    num_due: Mapping[int, int],
) -> list[Unfired]:
    """The faults of a campaign that did not fire.

    Of a fault that may fire several times only the first is required: the next comes only when
    its step is executed again.

    Args:
        campaign: that was run.
        history: of its run.
        fired: faults that fired, by their index.
        killed: kills that hit, likewise.
        num_due: how often each kill was due while all processes ran, likewise.
    """
    recovered_at = set(_recovered_at(history))
    resumed_from = recovered_at | {view.from_step for view in history.attempts[1:]}
    last_recovered = max(recovered_at, default=-1)
    missing = [
        Unfired(
            f"{fault.kind} of rank {fault.rank} at {fault.point} of step {fault.step}",
            _fault_reason(fault, resumed_from, last_recovered),
        )
        for number, fault in enumerate(campaign.faults)
        if number not in fired
    ]
    for number, kill in enumerate(campaign.kills):
        if number not in killed:
            missing.append(Unfired(str(kill), _kill_reason(kill, num_due.get(number, 0))))
    return missing


def _kill_reason(kill: Kill, num_due: int) -> str | None:
    if kill.victim is Victim.SPARE:
        is_over = num_due < ENOUGH_POLLS_FOR_SPARE
        return "the run was over before another container stood by" if is_over else None
    return "the run was over before the next poll" if num_due < ENOUGH_POLLS else None


def _fault_reason(fault: DrillFault, resumed_from: set[int], last_recovered: int) -> str | None:
    if fault.point is DrillPoint.RECOVERY:
        if last_recovered + 1 < fault.step:
            return "no recovery inside the processes came so late"
        return None
    if fault.step in resumed_from:
        # Some ranks took the state after this step from others.
        return "training continued after its step, which the rank may not have executed itself"
    return None


def _recovered_at(history: RunHistory) -> Iterator[int]:
    """Steps after which a recovery inside the processes let training continue."""
    for view in history.attempts:
        for recovery in view.recoveries:
            # An operator retry reconnects below the step: no rank passes the recovery point.
            if (
                recovery.ended is not None
                and recovery.began.decision.rung is not Rung.OPERATOR_RETRY
            ):
                step = recovery.ended.step
                if recovery.succeeded and step is not None:
                    yield step
