"""What the protocol of a node replacement takes with more ranks than one machine has.

Pure: the state machine is run with that many simulated ranks and its messages are counted; their
cost comes from a measured replacement through the real coordinator, as an explicit input. Times
are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale.coordinator import Served
from benchmarks.scale.state_machine import Course


@dataclass(frozen=True, slots=True)
class Costs:
    """What one message costs.

    Attributes:
        message_s: CPU time of the coordinator: parsing, state machine, writing, the kernel.
        round_trip_s: between a rank and the coordinator.
        source: where the figures come from.
    """

    message_s: float
    round_trip_s: float
    source: str

    @classmethod
    def of(cls, served: Served, *, round_trip_s: float) -> Costs:
        """Those of a measured replacement; the round trip of another network is given."""
        source = f"coordinator with {served.num_ranks} connections, this machine"
        return cls(served.message_s, round_trip_s, source)


# The coordinator waits for all ranks this often: for their reports, then until they train.
ROUNDS = 2


def protocol_s(course: Course, costs: Costs) -> float:
    """From the loss that the coordinator is told of to the record that all ranks train.

    Without what ranks do in between: connections, state, the step. One thread of one core handles
    all messages one after the other, and none of them overlaps with the network's time.
    """
    return course.num_messages * costs.message_s + ROUNDS * costs.round_trip_s
