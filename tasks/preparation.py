"""Data preparation as a cached Prefect task: the record of what is prepared is its stored result.

Of a corpus, the record is the manifest in the run's own object store, and the cache key is the
fingerprint of the inputs, which names the manifest. Of a job's own command, it is beside the
outputs, on the nodes, whose agents compare it with inputs and outputs. A record that is there and
whole, with everything that it names, is a cached result, wherever the flow runs. Anything else is
none, and the task is carried out. Nothing that is read is unpickled or names a type. Facts about
results: Prefect 3.8.8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.filesystems import WritableFileSystem
from prefect.serializers import JSONSerializer
from prefect.tasks import Task
from pydantic import PrivateAttr
from typing_extensions import override

from perdure.storage.address import open_store
from perdure.tasks.credentials import credentials_of
from perdure.tasks.states import completed, data_of
from perdure.tasks.supervision import Supervision
from perdure.training.config.job import Job
from perdure.training.engines.base import Placement
from perdure.training.errors import InputError
from perdure.training.reporting.markdown import counted
from perdure.training.supervisor.preparing import PreparationError
from perdure.training.trainer.data.corpus import CorpusError
from perdure.training.trainer.data.prepare import DataOutcome, find_prepared, inputs_of, prepare
from perdure.training.trainer.data.tokenizer import open_tokenizer

# Prefect's own has a decoder that imports the types which a stored document names, and the
# exception of a task that failed is stored, too: as its text.
PLAIN = JSONSerializer(object_encoder="builtins.str", object_decoder=None)


class CheckedResults(WritableFileSystem):
    """Results as Prefect asks for them, by cache key, checked when it asks; no block to be saved.

    What is prepared is the record of it, wherever that is.
    """

    _find: Callable[[str], Any] = PrivateAttr()
    _records: dict[str, bytes] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, find: Callable[[str], Any]) -> CheckedResults:
        """Have results found by a function; None: there is none, or it does not hold any more."""
        block = cls()
        block._find = find
        return block

    @override
    def read_path(self, path: str, **_options: Any) -> bytes:  # type: ignore[override]
        """The result with a key. Prefect asks twice: whether there is one, and for the result.

        Raises:
            FileNotFoundError: there is none, or it does not hold any more.
        """
        if path not in self._records:
            result = self._find(path)
            if result is None:
                raise FileNotFoundError(path)
            record = {
                "metadata": {"storage_key": path, "serializer": PLAIN.model_dump()},
                "result": PLAIN.dumps(result).decode(),
            }
            self._records[path] = json.dumps(record).encode()
        return self._records[path]

    @override
    def write_path(self, path: str, content: bytes, **_options: Any) -> None:  # type: ignore[override]
        """Store a result: the task has committed its record already, as its last act."""

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
    store = open_store(job.storage, credentials_of(job.storage))

    def find(key: str) -> dict[str, Any] | None:
        result = find_prepared(store, key, log=get_run_logger().warning)
        return result.outcome.model_dump() if result is not None else None

    cached.result_storage = CheckedResults.of(find)
    outcome = DataOutcome.model_validate(data_of(cached(job, return_state=True)))
    if outcome.skipped:
        get_run_logger().info(
            "the corpus is prepared already: %s, checked in %.0f ms (%s)",
            _size(outcome), outcome.duration_s * 1e3, outcome.manifest_key,
        )  # fmt: skip
    return outcome


def key_of_command(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """The cache key: whether the outputs are there is asked on the nodes, for any key."""
    return str(parameters["placement"].number)


def may_prepare_again(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether the command has failed over something that may pass."""
    return isinstance(state.data, PreparationError) and state.data.may_pass


@task(
    name="prepare",
    cache_key_fn=key_of_command,
    persist_result=True,
    result_serializer=PLAIN,
    cache_result_in_memory=False,
    retry_condition_fn=may_prepare_again,
)
def prepare_by_command(supervision: Supervision, placement: Placement) -> list[str]:
    """Have the job's own command prepare data on the nodes. Returns the nodes."""
    preparer = supervision.run.preparer(placement)
    seconds = preparer.prepare(
        stop_wanted=supervision.stop_wanted,
        on_progress=supervision.story.show,
    )
    return completed(list(preparer.nodes), f"{', '.join(preparer.nodes)} in {seconds:.1f} s")


def ensure_prepared(supervision: Supervision, placement: Placement) -> None:
    """Have the command of a job prepare its data, or find it prepared.

    Raises:
        Exception: the command has failed, or a stop was requested.
    """
    restart, preparer = supervision.job.restart, supervision.run.preparer(placement)
    cached = prepare_by_command.with_options(
        task_run_name=f"prepare on {','.join(preparer.nodes)}",
        retries=restart.in_place_retries,
        retry_delay_seconds=restart.delay_s,
    )
    cached.result_storage = CheckedResults.of(
        lambda _key: list(preparer.nodes) if preparer.is_prepared() else None
    )
    supervision.story.show("preparing data")
    data_of(cached(supervision, placement, return_state=True))


def _size(outcome: DataOutcome) -> str:
    return f"{counted(outcome.num_shards, 'shard')}, {outcome.num_tokens:,} tokens"
