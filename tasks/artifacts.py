"""The artifacts of a run on the server: each is found by its key, and changed in place.

Versions would be thousands in a run, and a supervisor that adopts a run must not double the
artifacts of its predecessor. Facts on Prefect 3.8.8: the client's own `update_artifact` puts the
whole content into an event, pictures too, so changes are sent without it; the page of a flow run
shows the artifacts of that flow run alone, so a run that goes on in another flow run gets new ones.
The table of checkpoints lists those that exist; deleted ones leave it. Sizes are bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import Artifact as Found
from prefect.client.schemas.sorting import ArtifactSort
from rich.filesize import decimal

from perdure.storage.checkpoint import (
    MANIFEST_NAME,
    CheckpointStore,
    StepObjects,
    StepState,
    read_manifest,
)
from perdure.storage.verification import VERIFIED_NAME, last_outcome
from perdure.training.journal.history import RunHistory
from perdure.training.reporting.markdown import clock_text
from perdure.training.supervisor.checkpoints import node_tiers, program_saves


def checkpoint_rows(
    checkpoints: CheckpointStore, home: Path, history: RunHistory
) -> list[dict[str, str]]:
    """The checkpoints that exist, newest first, for the UI.

    Args:
        checkpoints: checkpoints of the run, in the store.
        home: Perdure's folder on this machine, whose nodes' tiers can be seen.
        history: ledger of the run, as read.

    Raises:
        StorageError: the store does not answer.
    """
    if history.is_command:
        return [
            {
                "step": str(save.step),
                "saved (UTC)": clock_text(save.written_at_s),
                "size": decimal(save.size_bytes),
                "path": save.path,
                "by attempt": save.attempt,
            }
            for save in reversed(program_saves(history))
            if save.is_kept is not False
        ]
    on_nodes = node_tiers(home, checkpoints.run_id)
    by = {record.step: f"{record.placement}.{record.attempt}" for record in history.checkpoints}
    return [
        {
            "step": str(step.step),
            "saved (UTC)": clock_text(step.objects[MANIFEST_NAME].modified_s),
            "size": decimal(step.size_bytes),
            "tiers": ", ".join(step.tiers(on_nodes)),
            "verified": _verified_text(checkpoints, step),
            "by attempt": by.get(step.step, ""),
        }
        for step in reversed(checkpoints.list_steps())
        if MANIFEST_NAME in step.objects
    ]


def _verified_text(checkpoints: CheckpointStore, step: StepObjects) -> str:
    if step.state is StepState.SET_ASIDE:
        return "damaged, set aside"
    # Its manifest is read only where it may matter: there may be many, at every look.
    verified = VERIFIED_NAME in step.objects
    manifest = read_manifest(checkpoints, step) if verified else None
    outcome = last_outcome(checkpoints, step, manifest)
    if outcome is None:
        return "when it was written"
    return f"{'intact' if outcome.is_intact else 'damaged'} {clock_text(outcome.verified_at_s)}"


GOES_ON = "The run goes on in another flow run. "
# Both UIs list a flow run's artifacts by their ids, newest or not, and the server draws an id at
# random (3.8.8). So the first of all is drawn again until its id is high, others until it is not.
TOP = "needs-you"
_TOP_FROM = UUID("e0000000-0000-4000-8000-000000000000")
_MAX_DRAWS = 60  # fewer than 8 are expected, and 60 are not enough once in 3,000 times


class ArtifactKind(StrEnum):
    """Form in which the UI draws an artifact; the values are Prefect's."""

    MARKDOWN = "markdown"
    PROGRESS = "progress"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Artifact:
    """Content of an artifact.

    Attributes:
        name: within the run.
        kind: form in which the UI draws it.
        content: markdown, percent, or rows.
        description: one line; cards show it.
    """

    name: str
    kind: ArtifactKind
    content: str | float | list[dict[str, Any]]
    description: str

    @property
    def document(self) -> dict[str, Any]:
        """Fields that the server takes."""
        data = json.dumps(self.content) if isinstance(self.content, list) else self.content
        return {"data": data, "description": self.description}


class Artifacts:
    """Artifacts of one run on the server, as far as this process has put or found them there.

    Args:
        run_id: start of the artifacts' keys.
        flow_run_id: flow run that new artifacts belong to; None outside a flow run.
        flow_runs: flow runs that have supervised the run. Another run of its name, on another
            machine, has artifacts under the same keys, and they are not touched.
    """

    def __init__(
        self,
        run_id: str,
        flow_run_id: UUID | None,
        flow_runs: Callable[[], Sequence[UUID]] = tuple,
    ) -> None:
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._flow_runs = flow_runs
        self._ids: dict[str, UUID] = {}
        self._digests: dict[str, bytes] = {}

    def put(self, artifact: Artifact) -> None:
        """Create it, change it where it differs, or do nothing.

        Raises:
            Exception: the server did not take it.
        """
        digest = _digest(artifact.document)
        if self._digests.get(artifact.name) == digest:
            return
        with get_client(sync_client=True) as client:
            if artifact.name not in self._ids:
                self._find(client, artifact)
            if artifact.name in self._ids:
                if self._digests.get(artifact.name) != digest:
                    self._change(client, artifact)
            else:
                self._create(client, artifact)
        self._digests[artifact.name] = digest

    def _key(self, artifact: Artifact) -> str:
        return f"{self._run_id}-{artifact.name}"

    def _find(self, client: SyncPrefectClient, artifact: Artifact) -> None:
        """Look up the artifact that an earlier supervisor has put under the key."""
        flow_run_id = self._flow_run_id
        flow_runs = [*self._flow_runs(), *([flow_run_id] if flow_run_id is not None else [])]
        if not flow_runs:
            return
        wanted = ArtifactFilter(
            key=ArtifactFilterKey(any_=[self._key(artifact)]),
            flow_run_id=ArtifactFilterFlowRunId(any_=flow_runs),
        )
        newest = ArtifactSort.CREATED_DESC
        for earlier in client.read_artifacts(artifact_filter=wanted, sort=newest, limit=1):
            if earlier.flow_run_id == flow_run_id:
                if not self._is_in_order(artifact.name, earlier.id):
                    client.delete_artifact(earlier.id)  # a draw that an error cut short
                    return
                self._ids[artifact.name] = earlier.id
                self._digests[artifact.name] = _digest_of(earlier)
            elif not (earlier.description or "").startswith(GOES_ON):
                note = {"description": GOES_ON + (earlier.description or "")}
                _patch(client, earlier.id, note)

    def _create(self, client: SyncPrefectClient, artifact: Artifact) -> None:
        content = ArtifactCreate(
            key=self._key(artifact),
            type=artifact.kind.value,
            flow_run_id=self._flow_run_id,
            **artifact.document,
        )
        created = client.create_artifact(content)
        for _ in range(_MAX_DRAWS):
            if self._is_in_order(artifact.name, created.id):
                break
            client.delete_artifact(created.id)
            created = client.create_artifact(content)
        self._ids[artifact.name] = created.id

    def _is_in_order(self, name: str, artifact_id: UUID) -> bool:
        # Not compared with the first's own id: it may come last, after a server that was away.
        return (artifact_id >= _TOP_FROM) is (name == TOP)

    def _change(self, client: SyncPrefectClient, artifact: Artifact) -> None:
        try:
            _patch(client, self._ids[artifact.name], artifact.document)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
            self._create(client, artifact)  # a user has deleted it


def _patch(client: SyncPrefectClient, artifact_id: UUID, document: dict[str, Any]) -> None:
    client.request("PATCH", "/artifacts/{id}", json=document, path_params={"id": artifact_id})


def _digest_of(artifact: Found) -> bytes:
    return _digest({"data": artifact.data, "description": artifact.description})


def _digest(document: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
