"""Campaigns: runs with many faults of all kinds, drawn from a seed or read from a file.

Despite all faults, the curve of the run equals that of the undisturbed run, and no process is left
over. A fault that did not fire has a reason, or the campaign proves too little. Steps are completed
optimizer steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import from_json

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint, Kill, Victim
from perdure.training.config.model import ParallelKind
from perdure.training.drill.job import NUM_RANKS
from perdure.training.errors import InputError
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import Rung

SAVE_EVERY_STEPS = 3
STEPS_PER_FAULT = 3
FIRST_STEP = 4  # before it, there is no save for a restart to begin with
LINK_RETRY_EVERY = 2  # operator retry is on for the seeds that it divides
MORE_THAN_ONCE = 0.05  # share of faults that fire again when their step is executed again
HANG_TIMEOUT_S = 10.0
# A process that is missing at a poll may be about to start; at the next poll it is there.
ENOUGH_POLLS = 2
# The next spare is ready some seconds after a member took the last; polls are 0.2 s apart.
ENOUGH_POLLS_FOR_SPARE = 150

# A campaign does not test budgets: its faults come too often for any budget.
_OVERRIDES: Mapping[str, dict[str, Any]] = {
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

# A hanging start has a drill of its own; here it would use up the campaign's time.
_ANYWHERE = tuple(point for point in DrillPoint if point is not DrillPoint.RESTORE)
# An error raised under a collective comes out of C++ with another type.
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
# Relative frequency of each cause; causes that cost a run many seconds are rare.
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
# Without replicas, these end the processes every time.
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


@dataclass(frozen=True, slots=True)
class UnfiredFault:
    """A fault or kill of a campaign that did not happen.

    Attributes:
        description: the fault in words, for reports.
        reason: why it could not happen; None: it should have.
    """

    description: str
    reason: str | None


class Campaign(FrozenModel):
    """The faults of a run."""

    seed: int = Field(0, description="that it was drawn from")
    parallelism: ParallelKind = Field(ParallelKind.DDP, description="of the job")
    steps: int = Field(ge=1, description="target step of the job")
    overrides: dict[str, dict[str, Any]] = Field({}, description="fields of the job, by section")
    faults: tuple[DrillFault, ...] = Field((), description="made in the worker processes")
    kills: tuple[Kill, ...] = Field((), description="made from outside")

    @classmethod
    def draw(
        cls, seed: int, *, num_faults: int, kind: ParallelKind, is_of_gloo: bool = True
    ) -> Campaign:
        """Draw a campaign from a seed: the same seed gives the same campaign.

        Args:
            seed: starts the random numbers.
            num_faults: number of faults and kills.
            kind: the job's parallelism.
            is_of_gloo: whether collectives run over gloo, whose connections break and whose
                beginning is a point of a step; devices have their own library.
        """
        rng = Random(seed)  # noqa: S311 nothing here is secret
        steps = FIRST_STEP + num_faults * STEPS_PER_FAULT + SAVE_EVERY_STEPS
        has_retry = is_of_gloo and seed % LINK_RETRY_EVERY == 0
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
                kill = _draw_kill(rng, cause, step)
                if kill not in kills:  # the second would find no victim
                    kills.append(kill)
            else:
                faults.append(_draw_fault(rng, cause, step, is_of_gloo=is_of_gloo))
        return cls(
            seed=seed,
            parallelism=kind,
            steps=steps,
            overrides={**_OVERRIDES, "comm": {"link_retry": has_retry}},
            faults=tuple(sorted(faults, key=lambda fault: fault.step)),
            kills=tuple(sorted(kills, key=lambda kill: kill.step)),
        )

    @classmethod
    def read(cls, path: Path) -> Campaign:
        """Read a campaign from a file.

        Raises:
            InputError: the file cannot be read, or holds no campaign.
        """
        try:
            return cls.model_validate(from_json(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError("--campaign", f"{str(path)!r}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise InputError("--campaign", f"{str(path)!r}: {place}: {first['msg']}") from error
        except ValueError as error:
            raise InputError("--campaign", f"{str(path)!r}: is not JSON: {error}") from error

    def write(self, path: Path) -> None:
        """Write the campaign to a file, to be run again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def size(self) -> int:
        """Number of faults and kills."""
        return len(self.faults) + len(self.kills)

    @property
    def starts(self) -> int:
        """How often the run has to be started: errors of the program stop it."""
        return 1 + sum(fault.times for fault in self.faults if fault.kind is DrillKind.EXCEPTION)

    def select(self, indices: Collection[int]) -> Campaign:
        """Select some of the faults and kills, by their index among all of them."""
        faults = tuple(fault for n, fault in enumerate(self.faults) if n in indices)
        first = len(self.faults)
        kills = tuple(kill for n, kill in enumerate(self.kills, start=first) if n in indices)
        return self.model_copy(update={"faults": faults, "kills": kills})

    def find_unfired(
        self,
        history: RunHistory,
        *,
        fired: Collection[int],
        killed: Collection[int],
        num_due: Mapping[int, int],
    ) -> list[UnfiredFault]:
        """Find the faults and kills that did not happen.

        A fault that may fire several times has to fire only once: it fires again only when its step
        is executed again.

        Args:
            history: the history of the campaign's run.
            fired: indices of the faults that fired.
            killed: indices of the kills that hit.
            num_due: how often each kill was due while all processes ran, by its index.
        """
        recovered_at = set(_recovered_at(history))
        resumed_from = recovered_at | {view.from_step for view in history.attempts[1:]}
        last_recovered = max(recovered_at, default=-1)
        missing = [
            UnfiredFault(
                f"{fault.kind} of rank {fault.rank} at {fault.point} of step {fault.step}",
                _fault_reason(fault, resumed_from, last_recovered),
            )
            for number, fault in enumerate(self.faults)
            if number not in fired
        ]
        for number, kill in enumerate(self.kills):
            if number not in killed:
                reason = _kill_reason(kill, num_due.get(number, 0))
                missing.append(UnfiredFault(str(kill), reason))
        return missing


def _weight(cause: DrillKind | Victim, kind: ParallelKind) -> int:
    is_rare = kind is ParallelKind.FSDP2 and cause in _NEEDS_REPLICAS
    return 1 if is_rare else _WEIGHTS[cause]


def _draw_kill(rng: Random, victim: Victim, step: int) -> Kill:
    # The run has two members, with four ranks.
    index = rng.randrange(NUM_RANKS if victim is Victim.RANK else 2)
    return Kill(victim=victim, index=index, step=step)


def _draw_fault(rng: Random, kind: DrillKind, step: int, *, is_of_gloo: bool) -> DrillFault:
    points = [p for p in POINTS[kind] if is_of_gloo or p is not DrillPoint.REDUCING]
    point = rng.choice(points)
    if point is DrillPoint.SAVE:
        step -= step % SAVE_EVERY_STEPS  # no other step is saved
    # A step that is abnormal twice is accepted, which changes the curve.
    once = (DrillKind.GRADIENT, DrillKind.EXCEPTION)
    fires_twice = kind not in once and rng.random() < MORE_THAN_ONCE
    return DrillFault(
        kind=kind,
        rank=rng.randrange(NUM_RANKS),
        step=step,
        point=point,
        times=2 if fires_twice else 1,
    )


def _kill_reason(kill: Kill, num_due: int) -> str | None:
    if kill.victim is Victim.SPARE:
        is_early = num_due < ENOUGH_POLLS_FOR_SPARE
        return "the run was over before the next spare was ready" if is_early else None
    return "the run was over before the next poll" if num_due < ENOUGH_POLLS else None


def _fault_reason(fault: DrillFault, resumed_from: set[int], last_recovered: int) -> str | None:
    if fault.point is DrillPoint.RECOVERY:
        if last_recovered + 1 < fault.step:
            return "no recovery inside the processes came so late"
        return None
    if fault.step in resumed_from:
        # Some ranks took the state after this step from other ranks.
        return "training continued after its step, which the rank may not have executed itself"
    return None


def _recovered_at(history: RunHistory) -> Iterator[int]:
    """Yield the steps after which a recovery inside the processes let training continue."""
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
