"""How the pods of a run are created, with the objects that they need. Times are seconds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.engines.base import Placement, agent_config
from perdure.training.engines.kubernetes import objects
from perdure.training.engines.kubernetes.api import (
    CONFIG_MAPS,
    POD_GROUPS,
    PODS,
    SECRETS,
    Api,
    ApiError,
    Resource,
)
from perdure.training.engines.kubernetes.objects import Document, Owner, PodPlan
from perdure.training.errors import NoCapacity
from perdure.training.job import Job
from perdure.training.journal.records import Member
from perdure.training.specs.engine import KubernetesEngineSpec

# What the webhook of Volcano answers (pkg/webhooks/admission/pods of volcano-sh/volcano).
POD_GROUP_WAITS = "podgroup phase is Pending"
_STORE = "store-keys"
_CONFIG = "agent-config"
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class PodCreation:
    """Creates the pods of one run.

    Args:
        api: of their cluster.
        job: of the run.
        spec: its engine.
        epoch: the supervisor's.
        secrets_env: the keys of the store, by the names of their variables.
        created_s: when the run was created.
    """

    def __init__(
        self,
        api: Api,
        job: Job,
        spec: KubernetesEngineSpec,
        *,
        epoch: int,
        secrets_env: Mapping[str, str],
        created_s: float,
    ) -> None:
        self._api, self._job, self._spec = api, job, spec
        self._epoch = epoch
        self._secrets_env = dict(secrets_env)
        self._created_s = created_s

    def plan(self, placement: Placement, member: Member) -> PodPlan:
        """A pod for a member, under a name that none has had."""
        letters = "".join(secrets.choice(_LETTERS) for _ in range(5))
        return PodPlan(member, objects.pod_name(self._job, member, letters), placement)

    def create(self, plans: Sequence[PodPlan], *, wait_s: float) -> dict[str, str]:
        """Create pods and what they need.

        Args:
            plans: of the pods.
            wait_s: for room in Volcano's queue, which lets no pod through before.

        Returns:
            The token of each pod's agent, by the pod's name.

        Raises:
            NoCapacity: a quota is used up.
            EngineError: the API server refuses them.
        """
        job, spec = self._job, self._spec
        tokens = {plan.name: secrets.token_hex(16) for plan in plans}
        try:
            owner = self._owner()
            store = self._store_secret(owner)
            if spec.volcano is not None:
                self._ensure(POD_GROUPS, objects.pod_group(job, spec, owner))
            for plan in plans:
                config = {CONFIG_FILE: self._config_of(plan, tokens[plan.name])}
                self._ensure(SECRETS, objects.secret(job, owner, plan.name, config, part=_CONFIG))
                document = objects.pod(job, spec, owner, plan, store_secret=store)
                self._create_pod(document, wait_s=wait_s)
        except ApiError as error:
            if error.is_quota:
                raise NoCapacity(str(error)) from error
            raise
        return tokens

    def _create_pod(self, document: Document, *, wait_s: float) -> None:
        """Create a pod; Volcano's own check lets none through before its queue has room.

        Raises:
            NoCapacity: it had none in time.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                self._ensure(PODS, document)
            except ApiError as error:
                if POD_GROUP_WAITS not in str(error):
                    raise
                if time.monotonic() > deadline_s:
                    raise NoCapacity(str(error)) from error
                time.sleep(1.0)
            else:
                return

    def _owner(self) -> Owner:
        name = objects.name_of(self._job)
        made = self._ensure(CONFIG_MAPS, objects.owner(self._job))
        return Owner(name, made["metadata"]["uid"])

    def _store_secret(self, owner: Owner) -> str | None:
        """Name of the Secret with the keys of the store; None: pods have their own way to it."""
        if self._spec.storage_secret is not None or not self._secrets_env:
            return self._spec.storage_secret
        name = f"{objects.name_of(self._job)}-{_STORE}"
        document = objects.secret(self._job, owner, name, self._secrets_env, part=_STORE)
        made = self._ensure(SECRETS, document)
        if made["data"] != document["data"]:  # the keys were renewed
            self._api.patch(SECRETS, name, {"data": document["data"]})
        return name

    def _ensure(self, resource: Resource, document: Document) -> Document:
        """Create an object, or find the one that is there."""
        try:
            return self._api.create(resource, document)
        except ApiError as error:
            if not error.is_conflict:
                raise
        return self._api.get(resource, document["metadata"]["name"])

    def _config_of(self, plan: PodPlan, token: str) -> str:
        disk = objects.disk_folder_of(self._job, self._spec, self._created_s)
        config = agent_config(
            self._job, plan.member, token=token, epoch=self._epoch, node_folder=disk
        )
        # The pod's address is known in the pod alone.
        return config.model_copy(
            update={"host": "", "port": self._spec.agent_port, "on_loopback": True}
        ).model_dump_json()
