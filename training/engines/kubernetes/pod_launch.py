"""The start of pods for members: all are up, or none is left. Times are seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from perdure.training.engines.base import ANY_NODE, Placement
from perdure.training.engines.kubernetes.api import SECRETS, Api
from perdure.training.engines.kubernetes.pod_lifecycle import PodCreation, PodEnd
from perdure.training.engines.kubernetes.pods import read_pods
from perdure.training.engines.kubernetes.watching import Informer
from perdure.training.errors import EngineError, ImageUnavailable

PULLS_S = 20.0  # for an image that cannot be pulled, before another node is tried

_log = logging.getLogger("perdure.engine")


@dataclass(slots=True)
class PodLaunch:
    """One start of pods.

    Attributes:
        names: of the pods by member.
        tokens: of their agents, by the pods' names.
    """

    api: Api
    informer: Informer
    creation: PodCreation
    ending: PodEnd
    names: dict[int, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def bring_up(
        self, placement: Placement, members: Collection[int], *, left_out: Mapping[str, str]
    ) -> None:
        """Create pods for members and wait until their agents listen; delete all if any fails.

        Where a node cannot pull the image, the pod gets another node, if there is any.

        Args:
            placement: the members' placement.
            members: indices of the members.
            left_out: nodes that get no pods, with the reasons.

        Raises:
            NoCapacity: there is no room for all of them.
            ImageUnavailable: the image cannot be pulled at the moment.
            EngineError: a pod cannot start, or did not start in time.
        """
        since_s, pulls_s = time.monotonic(), PULLS_S
        try:
            self._create(placement, members)
            while True:
                try:
                    self.creation.await_up(
                        [*self.names.values()], since_s=since_s, pulls_s=pulls_s,
                        on_pending=placement.on_pending, left_out=left_out,
                    )  # fmt: skip
                except ImageUnavailable as error:
                    if not error.containers:
                        raise
                    _log.warning("another node is tried: %s", error)
                    placement = self._move(placement, error.containers)
                    pulls_s *= 2
                else:
                    return
        except EngineError:
            self._give_back([*self.names.values()])
            raise

    def _create(self, placement: Placement, members: Collection[int]) -> None:
        plans = [self.creation.plan(placement, placement.members[i]) for i in sorted(members)]
        self.names |= {plan.member.index: plan.name for plan in plans}
        self.tokens |= self.creation.create(plans, on_pending=placement.on_pending)

    def _move(self, placement: Placement, pods: Collection[str]) -> Placement:
        """Start other pods for the members of these. Returns a placement with their nodes last."""
        by_name = read_pods(self.informer.objects)
        members = [index for index, name in self.names.items() if name in pods]
        nodes = [by_name[name].node for name in pods if name in by_name]
        self._give_back(pods)
        placement = replace(
            placement.with_nodes(dict.fromkeys(members, ANY_NODE)),
            last=tuple(dict.fromkeys((*placement.last, *nodes))),
        )
        self._create(placement, members)
        return placement

    def _give_back(self, names: Collection[str]) -> None:
        """Delete pods that were created in vain, with their Secrets."""
        try:
            self.informer.refresh()
            by_name = read_pods(self.informer.objects)
            self.ending.end([by_name[name] for name in names if name in by_name])
            for name in names:
                self.api.delete(SECRETS, name)
        except EngineError as error:
            _log.warning("the pods that were placed could not be deleted: %s", error)
