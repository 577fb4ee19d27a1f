"""Data preparation as a cached Prefect task: the manifest is the task's stored result.

The cache key is the fingerprint of the inputs, which names the manifest, and the result storage is
the run's own object store: a manifest that is there and whole, with all its shards, is a cached
result, on whatever node the flow runs. Anything else is none, and the task is carried out. Nothing
that is read from the store is unpickled or names a type. Facts about results: Prefect 3.8.8.
"""

from __future__ import annotations

import json
from typing import Any

from prefect import get_run_logger, task
from prefect.context import TaskRunContext
from prefect.filesystems import WritableFileSystem
from prefect.serializers import JSONSerializer
from pydantic import PrivateAttr
from typing_extensions import override

from perdure.storage.address import open_store
from perdure.storage.objects import ObjectStore
from perdure.tasks.credentials import credentials_of
from perdure.tasks.states import completed, data_of
from perdure.training.config.job import Job
from perdure.training.errors import InputError
from perdure.training.reporting.markdown import counted
from perdure.training.trainer.data.corpus import CorpusError
from perdure.training.trainer.data.prepare import DataOutcome, find_prepared, inputs_of, prepare
from perdure.training.trainer.data.tokenizer import open_tokenizer

# Prefect's own has a decoder that imports the types which a stored document names, and the
# exception of a task that failed is stored, too: as its text.
PLAIN = JSONSerializer(object_encoder="builtins.str", object_decoder=None)


class PreparedCorpora(WritableFileSystem):
    """Results of `prepare_data` as Prefect asks for them, by cache key; never saved as a block."""

    _store: ObjectStore = PrivateAttr()
    _found: dict[str, bytes] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, store: ObjectStore) -> PreparedCorpora:
        """Those in a store."""
        block = cls()
        block._store = store
        return block

    @override
    def read_path(self, path: str, **_options: Any) -> bytes:  # type: ignore[override]
        """The result with a key. Prefect asks twice: whether there is one, and for the result.

        Raises:
            FileNotFoundError: there is none, or it does not hold any more.
        """
        if path not in self._found:
            result = find_prepared(self._store, path, log=get_run_logger().warning)
            if result is None:
                raise FileNotFoundError(path)
            record = {
                "metadata": {"storage_key": path, "serializer": PLAIN.model_dump()},
                "result": PLAIN.dumps(result.outcome.model_dump()).decode(),
            }
            self._found[path] = json.dumps(record).encode()
        return self._found[path]

    @override
    def write_path(self, path: str, content: bytes, **_options: Any) -> None:  # type: ignore[override]
        """Store a result: the task has committed the manifest already, as its last act."""

    def _resolve_path(self, _path: str) -> None:
        """Keys are not paths; without this, Prefect takes them for files below its folder."""


def key_of_inputs(_context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    """The cache key; none where the inputs cannot be used, which the task itself reports."""
    job: Job = parameters["job"]
    if job.data is None:
        return None
    try:
        return inputs_of(job.data, open_tokenizer(job.tokenizer))
    except (CorpusError, InputError, OSError):
        return None


@task(
    name="prepare_data",
    task_run_name="prepare_data",
    cache_key_fn=key_of_inputs,
    persist_result=True,
    result_serializer=PLAIN,
    # Or the outcome of an earlier call in this process would be taken for what is there now.
    cache_result_in_memory=False,
)
def prepare_data(job: Job) -> dict[str, Any]:
    """Token shards and their manifest: only what is missing is made. A `DataOutcome`."""
    if job.data is None:
        raise InputError("data", "is missing")
    store = open_store(job.storage, credentials_of(job.storage))
    logger = get_run_logger()
    result = prepare(
        job.data, open_tokenizer(job.tokenizer), store, log=logger.info, warn=logger.warning
    )
    message = (
        f"{_size(result.outcome)}: {result.written_shards} written, {result.reused_shards} "
        f"reused, {result.damaged_shards} damaged ones redone, in {result.duration_s:.1f} s"
    )
    return completed(result.outcome.model_dump(), message)


def ensure_data(job: Job) -> DataOutcome:
    """Have the corpus of a job prepared, or find it prepared.

    Raises:
        Exception: the task failed.
    """
    cached = prepare_data.with_options()
    # As an option, Prefect takes only blocks that are saved on its server, with all they hold.
    cached.result_storage = PreparedCorpora.of(open_store(job.storage, credentials_of(job.storage)))
    outcome = DataOutcome.model_validate(data_of(cached(job, return_state=True)))
    if outcome.skipped:
        get_run_logger().info(
            "the corpus is prepared already: %s, checked in %.0f ms (%s)",
            _size(outcome), outcome.duration_s * 1e3, outcome.manifest_key,
        )  # fmt: skip
    return outcome


def _size(outcome: DataOutcome) -> str:
    return f"{counted(outcome.num_shards, 'shard')}, {outcome.num_tokens:,} tokens"
