"""Which ranks hold the same state: what recovery inside the processes can copy from.

A rank's place on the axes tensor (tp), context (cp), data (dp) and pipeline (pp) parallelism shows
which part of the model it holds. Ranks that differ only in dp and cp hold the same part: context
parallelism cuts the sequence and duplicates the weights. Sharding along dp and cp (the optimizer
state with ZeRO-1, Megatron's distributed optimizer or MindSpore's optimizer parallelism, the
weights as well with FSDP) cuts it further, in runs of neighbouring ranks. MindFormers' rule
follows ("Training High Availability", section on the replica relationship): data_parallel /
optimizer_weight_shard_size copies, of which there must be two.

With expert parallelism (ep) the same ranks are laid out a second time for the parameters of the
experts, with a tensor parallelism of their own (etp) and what is left as data parallelism. A rank
is a replica of another if it holds the same dense parameters and the same experts. MindIO TFT
asks for both: "After MoE is enabled, the DP Size of both the dense layer and sparse layer must be
greater than 1" (MindCluster, MindIO TFT, Constraints).

Ranks are numbered as in Megatron-LM's RankGenerator (megatron/core/parallel_state.py, default
order tp-cp-ep-dp-pp): one generator has the dense axes, another the experts'. Its
num_distributed_optimizer_instances is the number of copies here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

COPIES_NEEDED = 2

Groups = tuple[tuple[int, ...], ...]


class Axis(StrEnum):
    """A dimension of the parallel layout."""

    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PP = "pp"


class RankOrder(StrEnum):
    """How ranks are numbered, fastest axis first.

    tp-cp-ep-dp-pp: Megatron's default; MindSpore's too, whose pipeline stages are blocks of ranks.
    tp-cp-ep-pp-dp: Megatron with --use-tp-pp-dp-mapping.
    """

    PP_LAST = "tp-cp-ep-dp-pp"
    DP_LAST = "tp-cp-ep-pp-dp"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, fastest first."""
        return tuple(Axis(name) for name in self.value.split("-"))

    def place(self, rank: int, sizes: Mapping[Axis, int]) -> Mapping[Axis, int]:
        """A rank's coordinates; an axis without a size has one place."""
        coordinates: dict[Axis, int] = {}
        for axis in self.axes:
            rank, coordinates[axis] = divmod(rank, sizes.get(axis, 1))
        return coordinates


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A parallel layout; the names in brackets are MindFormers'.

    Attributes:
        dp: data-parallel size of the dense parameters (data_parallel).
        tp: tensor-parallel size (model_parallel).
        pp: pipeline-parallel size (pipeline_stage).
        cp: context-parallel size (context_parallel).
        ep: expert-parallel size (expert_parallel).
        etp: tensor-parallel size of the experts; None: as `tp`.
        optimizer_shards: neighbouring ranks of data and context parallelism that share one
            optimizer state (optimizer_weight_shard_size); 1: every rank has all of its part.
        order: how ranks are numbered.

    Raises:
        ValueError: the sizes do not fit together.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    optimizer_shards: int = 1
    order: RankOrder = RankOrder.PP_LAST

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        for name in ("dp", "tp", "pp", "cp", "ep", "etp", "optimizer_shards"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be 1 or more")
        if self.duplicates % self.optimizer_shards:
            raise ValueError(
                f"optimizer_weight_shard_size={self.optimizer_shards} must divide dp x cp = "
                f"{self.dp} x {self.cp}"
            )
        if self.has_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        etp, each = self.expert_tp, self.expert_tp * self.ep * self.pp
        if self.world_size % each:
            raise ValueError(
                f"expert tensor x ep x pp = {etp} x {self.ep} x {self.pp} = {each} must divide "
                f"the number of ranks {self.world_size}"
            )
        instances = self.duplicates // self.optimizer_shards
        if self.optimizer_shards > 1 and self.expert_dp % instances:
            raise ValueError(
                f"{self.duplicates} / optimizer_weight_shard_size = {instances} copies must "
                f"divide the data parallelism of the experts, {self.expert_dp}"
            )
        # Both as Megatron asserts it: else its pipeline groups of the two generators differ.
        if self.order is not RankOrder.PP_LAST and self.pp > 1 and self.expert_dp != self.dp:
            raise ValueError(
                f"order={self.order} needs dp={self.dp} for the experts, too, which have "
                f"{self.expert_dp}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def duplicates(self) -> int:
        """Ranks that hold the same dense weights, before anything is sharded along them."""
        return self.dp * self.cp

    @property
    def has_experts(self) -> bool:
        """Whether the experts are laid out otherwise than the dense parameters."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.etp if self.etp is not None else self.tp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts, before anything is sharded along them."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def expert_shards(self) -> int:
        """Neighbouring ranks that share one optimizer state of the experts."""
        instances = self.duplicates // self.optimizer_shards
        return self.expert_dp // instances if self.optimizer_shards > 1 else 1

    @property
    def is_split(self) -> bool:
        """Whether the model itself is cut, so that ranks have different parts of it."""
        return self.tp * self.pp * self.ep * self.expert_tp > 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights and the same optimizer state, the fewest of any."""
        return min(len(group) for group in self.replica_groups())

    def place(self, rank: int) -> Mapping[Axis, int]:
        """A rank's coordinates in the layout of the dense parameters."""
        sizes = {Axis.TP: self.tp, Axis.CP: self.cp, Axis.DP: self.dp, Axis.PP: self.pp}
        return self.order.place(rank, sizes)

    def expert_place(self, rank: int) -> Mapping[Axis, int]:
        """A rank's coordinates in the layout of the experts."""
        sizes = {Axis.TP: self.expert_tp, Axis.EP: self.ep, Axis.DP: self.expert_dp}
        return self.order.place(rank, {**sizes, Axis.PP: self.pp})

    def dense_part(self, rank: int) -> Hashable:
        """Which part of the dense parameters and of their optimizer state a rank holds."""
        place = self.place(rank)
        index = place[Axis.DP] * self.cp + place[Axis.CP]
        return place[Axis.TP], place[Axis.PP], index % self.optimizer_shards

    def expert_part(self, rank: int) -> Hashable:
        """The same of the experts; one for all where they are laid out as the rest."""
        if not self.has_experts:
            return ()
        place = self.expert_place(rank)
        index = place[Axis.DP] % self.expert_shards
        return place[Axis.TP], place[Axis.EP], place[Axis.PP], index

    def replica_groups(self) -> Groups:
        """Ranks with the same weights and optimizer state, ordered by their first rank."""
        return _groups_of(self)

    def stream(self, rank: int) -> int:
        """Which random numbers a rank draws: the ranks of one tensor-parallel group the same.

        Between two sharded layers they compute the same, and dropout must not part them.
        """
        place = self.place(rank)
        index = place[Axis.DP] * self.cp + place[Axis.CP]
        return place[Axis.PP] * self.duplicates + index


@cache
def _groups_of(layout: ParallelLayout) -> Groups:
    ranks = range(layout.world_size)
    return _alike((layout.dense_part(r), layout.expert_part(r)) for r in ranks)


def _alike(parts: Iterable[Hashable]) -> Groups:
    """Ranks that hold the same part, ordered by their first rank."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank, part in enumerate(parts):
        groups[part].append(rank)
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
            reason=f"{_shortage(layout)}{left if mechanism is Mechanism.MEMORY_RETRY else ''}",
        )
    groups = layout.replica_groups()
    reason = f"{layout.copies} copies of every shard: {groups_text(groups)}"
    inside = _inside_a_node(groups, ranks_per_node)
    if inside is not None:
        reason += f"; a lost node takes every copy of {_ranks_text(inside)} with it"
    return Feasibility(is_possible=True, reason=reason)


def _shortage(layout: ParallelLayout) -> str:
    """Which copies a layout lacks, with the numbers."""
    dense = layout.duplicates // layout.optimizer_shards
    expert = layout.expert_dp // layout.expert_shards
    if dense < COPIES_NEEDED:
        name, size = "data_parallel", f"{layout.dp}"
        if layout.cp > 1:
            name, size = f"{name} x context_parallel", f"{size} x {layout.cp}"
        shards = layout.optimizer_shards
        return (
            f"{name} / optimizer_weight_shard_size = {size} / {shards} = {dense}, "
            f"needs >= {COPIES_NEEDED}"
        )
    if expert < COPIES_NEEDED:
        ranks = f"{layout.world_size} / ({layout.expert_tp} x {layout.ep} x {layout.pp})"
        return (
            f"data parallelism of the experts, ranks / (tensor x expert x pipeline) = {ranks} = "
            f"{layout.expert_dp}, in {layout.expert_shards} shards: {expert} copies, needs >= "
            f"{COPIES_NEEDED}"
        )
    return (
        f"{dense} copies of the dense parameters and {expert} of the experts, but no rank has "
        "both of another rank"
    )


def lack_of_replicas(layout: ParallelLayout) -> str | None:
    """Why no rank of a layout can have another one's state, None where one can."""
    copying = feasibility(Mechanism.PROCESS_REPLACE, layout)
    return None if copying.is_possible else f"no replica: {copying.reason}"


def lack_of_living_replica(
    rank: int | None, groups: Sequence[Collection[int]], holders: Collection[int]
) -> str | None:
    """Why no other rank has the state of this one, None when one has.

    Args:
        rank: global rank; None for none in particular.
        groups: ranks that hold the same state.
        holders: ranks that live and have a state.
    """
    replicas = next((set(group) - {rank} for group in groups if rank in group), None)
    if replicas is None or replicas & set(holders):
        return None
    if not replicas:
        return f"no replica: no other rank has the state of rank {rank}"
    return f"no replica of rank {rank} is left: {_ranks_text(tuple(sorted(replicas)))} lost theirs"


def lack_among_living(
    ranks: Collection[int], groups: Sequence[Collection[int]], holders: Collection[int]
) -> str | None:
    """Why the state of one of these ranks is with none of the others, None where all are.

    Args:
        ranks: global ranks that are lost together.
        groups: ranks that hold the same state.
        holders: ranks that live and have a state.
    """
    remaining = set(holders) - set(ranks)
    lacks = (lack_of_living_replica(rank, groups, remaining) for rank in ranks)
    return next((why for why in lacks if why is not None), None)


def _inside_a_node(groups: Groups, ranks_per_node: int | None) -> tuple[int, ...] | None:
    """The first group that lies on one node alone."""
    if ranks_per_node is None:
        return None
    alone = (g for g in groups if len({rank // ranks_per_node for rank in g}) == 1)
    return next(alone, None)


def groups_text(groups: Groups, *, at_most: int = 4) -> str:
    """Groups for a line of text: "[0, 4] [1, 5]"; many or large ones are shortened."""
    texts = [_ranks_text(group) for group in groups[:at_most]]
    more = len(groups) - at_most
    return " ".join([*texts, f"and {more} more"] if more > 0 else texts)


def _ranks_text(group: tuple[int, ...], *, at_most: int = 8) -> str:
    ranks = [str(rank) for rank in group]
    if len(ranks) > at_most:
        ranks = [*ranks[: at_most - 2], "...", ranks[-1]]
    return f"[{', '.join(ranks)}]"
