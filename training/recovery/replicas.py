"""Which ranks hold the same state: what recovery inside the processes can copy from.

A rank's place on the axes tensor (tp), data (dp) and pipeline (pp) parallelism shows which part
of the model it holds. Ranks that differ only in dp hold the same part; sharding along dp (the
optimizer state with ZeRO-1 or MindSpore's optimizer parallelism, the weights as well with
FSDP) cuts it further, in runs of neighbouring dp ranks. MindFormers' rule follows:
data_parallel / optimizer_weight_shard_size copies, of which there must be two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

COPIES_NEEDED = 2


class Axis(StrEnum):
    """A dimension of the parallel layout."""

    TP = "tp"
    DP = "dp"
    PP = "pp"


class RankOrder(StrEnum):
    """How ranks are numbered, fastest axis first.

    tp-dp-pp: Megatron's default; MindSpore's too, whose pipeline stages are blocks of ranks.
    tp-pp-dp: Megatron with --use-tp-pp-dp-mapping.
    """

    TP_DP_PP = "tp-dp-pp"
    TP_PP_DP = "tp-pp-dp"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, fastest first."""
        return tuple(Axis(name) for name in self.value.split("-"))


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A parallel layout.

    Attributes:
        dp: data-parallel size (MindSpore data_parallel).
        tp: tensor-parallel size (model_parallel).
        pp: pipeline-parallel size (pipeline_stage).
        optimizer_shards: neighbouring dp ranks that share one optimizer state
            (optimizer_weight_shard_size); 1: every rank has all of its part.
        order: how ranks are numbered.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    optimizer_shards: int = 1
    order: RankOrder = RankOrder.TP_DP_PP

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        for name in ("dp", "tp", "pp", "optimizer_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.dp % self.optimizer_shards:
            raise ValueError(f"optimizer_shards={self.optimizer_shards} must divide dp={self.dp}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights and the same optimizer state."""
        return self.dp // self.optimizer_shards

    def place(self, rank: int) -> Mapping[Axis, int]:
        """A rank's coordinates."""
        sizes = {Axis.TP: self.tp, Axis.DP: self.dp, Axis.PP: self.pp}
        coordinates: dict[Axis, int] = {}
        for axis in self.order.axes:
            rank, coordinates[axis] = divmod(rank, sizes[axis])
        return coordinates

    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks with the same weights and optimizer state, ordered by their first rank."""
        groups: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for rank in range(self.world_size):
            place = self.place(rank)
            groups[place[Axis.TP], place[Axis.PP], place[Axis.DP] % self.optimizer_shards].append(
                rank
            )
        return tuple(sorted(tuple(group) for group in groups.values()))


@dataclass(frozen=True, slots=True)
class Feasibility:
    """Whether a layout has what a recovery from replicas needs.

    Attributes:
        is_possible: whether it has.
        reason: one sentence fragment for the user, with the numbers.
    """

    is_possible: bool
    reason: str


class Mechanism(StrEnum):
    """Recovery inside the processes, named as the policy's switch; in the order it is tried."""

    MEMORY_RETRY = "memory_retry"
    PROCESS_REPLACE = "process_replace"
    END_OF_LIFE_CHECKPOINT = "end_of_life_checkpoint"


def feasibility(
    mechanism: Mechanism, layout: ParallelLayout, *, ranks_per_node: int | None = None
) -> Feasibility:
    """Whether the layout carries a mechanism.

    Args:
        mechanism: UCE, ARF or TTP, by the name of its switch.
        layout: how the ranks are laid out.
        ranks_per_node: neighbouring ranks that a lost node takes away; None: unknown.
    """
    if layout.copies < COPIES_NEEDED:
        # MindFormers: HCCE needs no replica.
        left = "; collective_retry (HCCE) needs none"
        return Feasibility(
            is_possible=False,
            reason=f"data_parallel / optimizer_weight_shard_size = {layout.dp} / "
            f"{layout.optimizer_shards} = {layout.copies}, needs >= {COPIES_NEEDED}"
            f"{left if mechanism is Mechanism.MEMORY_RETRY else ''}",
        )
    groups = layout.replica_groups()
    reason = f"{layout.copies} copies of every shard: {groups_text(groups)}"
    inside = _inside_a_node(groups, ranks_per_node)
    if inside is not None:
        reason += f"; a lost node takes every copy of {_ranks_text(inside)} with it"
    return Feasibility(is_possible=True, reason=reason)


def lack_of_replicas(layout: ParallelLayout) -> str | None:
    """Why no rank of a layout can have another one's state, None where one can."""
    found = feasibility(Mechanism.PROCESS_REPLACE, layout)
    return None if found.is_possible else f"no replica: {found.reason}"


def lack_of_living_replica(
    rank: int | None, groups: Sequence[Collection[int]], holders: Collection[int]
) -> str | None:
    """Why no other rank has the state of this one, None when one has.

    Args:
        rank: global rank; None for none in particular.
        groups: ranks that hold the same state.
        holders: ranks that live and have a state.
    """
    others = next((set(group) - {rank} for group in groups if rank in group), None)
    if others is None or others & set(holders):
        return None
    if not others:
        return f"no replica: no other rank has the state of rank {rank}"
    return f"no replica of rank {rank} is left: {_ranks_text(tuple(sorted(others)))} lost theirs"


def _inside_a_node(
    groups: tuple[tuple[int, ...], ...], ranks_per_node: int | None
) -> tuple[int, ...] | None:
    """The first group that lies on one node alone."""
    if ranks_per_node is None:
        return None
    alone = (g for g in groups if len({rank // ranks_per_node for rank in g}) == 1)
    return next(alone, None)


def groups_text(groups: tuple[tuple[int, ...], ...], *, at_most: int = 4) -> str:
    """Groups for a line of text: "[0, 4] [1, 5]"; many or large ones are shortened."""
    texts = [_ranks_text(group) for group in groups[:at_most]]
    more = len(groups) - at_most
    return " ".join([*texts, f"and {more} more"] if more > 0 else texts)


def _ranks_text(group: tuple[int, ...], *, at_most: int = 8) -> str:
    ranks = [str(rank) for rank in group]
    if len(ranks) > at_most:
        ranks = [*ranks[: at_most - 2], "...", ranks[-1]]
    return f"[{', '.join(ranks)}]"
