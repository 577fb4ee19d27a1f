"""The job: the pydantic specification of a run, and how a job file becomes one.

Everything a user may set is here and in `perdure.training.specs`; the JSON schema of `Job` is the
parameter form of the Prefect deployments. Times are seconds, sizes bytes, steps completed
optimizer steps.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from perdure.storage.address import StorageSpec
from perdure.storage.frozen_model import FrozenModel
from perdure.training.config import pod_rules
from perdure.training.config.command import CheckpointKind
from perdure.training.config.drill import DrillSpec
from perdure.training.config.engine import (
    DEFAULT_RECIPE,
    SCRIPT_RECIPE,
    AnyEngineSpec,
    KubernetesEngineSpec,
    LocalEngineSpec,
    WorkerSpec,
)
from perdure.training.config.model import (
    BatchSpec,
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelKind,
    ParallelSpec,
    Precision,
    TokenizerSpec,
)
from perdure.training.config.reading import field_of, message_of, read_document, read_document_file
from perdure.training.config.recovery import (
    PLATFORM_HANG_TIMEOUT_S,
    RECOMMENDED_KEEP_LAST,
    CheckpointSpec,
    CommSpec,
    RestartSpec,
    recommended_interval,
)
from perdure.training.config.run_name import NAME, TEMPLATE, InitFromSpec
from perdure.training.config.secrets import SecretSource, why_secret
from perdure.training.config.watch import HangAction, PreflightSpec, WatchSpec
from perdure.training.errors import InputError
from perdure.training.masking import has_key
from perdure.training.platforms.forms import GRACE
from perdure.training.recovery.replicas import ParallelLayout

MAX_USER_VARIABLES = 100  # ModelArts' limit for own environment variables of a training job
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 to warn of
RESERVED_PREFIXES = ("MA_", "VC_", "PERDURE_")
RESERVED_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"})
# Each attempt's own, whatever was there before: the job's would be lost.
OVERWRITTEN_NAMES = frozenset(
    {
        *("MASTER_ADDR", "GROUP_RANK"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    }
)


class Job(FrozenModel):
    """One pretraining run, from step 0 to its target step."""

    run_id: str = Field(
        description="name of the run: 1 to 63 characters of a-z, 0-9 and -, starting with a "
        "letter or digit",
        # It is in the keys of artifacts, for which Prefect takes nothing else (3.8.8).
        pattern=NAME,
    )
    storage: StorageSpec = Field(
        description="store of the checkpoints, the prepared data and the ledger"
    )
    steps: int = Field(
        1000,
        ge=1,
        description="target step, where training ends; a command has a target only if "
        "this is set, in its own count of steps",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights, data order and dropout")
    worker: WorkerSpec = Field(WorkerSpec(), description="training program")
    model: ModelSpec = Field(ModelSpec(), description="sizes of the built-in decoder")
    data: DataSpec | None = Field(None, description="corpus; the built-in trainer needs it")
    tokenizer: TokenizerSpec = Field(
        TokenizerSpec(),
        description="tokenizer of the corpus: raw bytes, or a file of the `tokenizers` library",
    )
    batch: BatchSpec = Field(BatchSpec(), description="samples per step")
    parallelism: ParallelSpec = Field(
        ParallelSpec(), description="wrapper of the model, and layout of the ranks"
    )
    precision: Precision = Field(
        Precision.FP32, description="arithmetic of forward and backward: fp32, bf16 or fp16"
    )
    optimizer: OptimizerSpec = Field(
        OptimizerSpec(), description="AdamW and its learning rate schedule"
    )
    checkpoint: CheckpointSpec = Field(
        CheckpointSpec(), description="when to save, where to keep copies, and what to retain"
    )
    restart: RestartSpec = Field(
        RestartSpec(),
        description="restart policy: which recoveries are on, and how often each may happen",
    )
    comm: CommSpec = Field(
        CommSpec(), description="time limits, ports and HCCL settings of the collectives"
    )
    init_from: InitFromSpec | None = Field(
        None, description="checkpoint of another run that supplies the initial weights"
    )
    engine: AnyEngineSpec = Field(
        LocalEngineSpec(), description="source of the nodes: this machine, or a Kubernetes cluster"
    )
    watch: WatchSpec = Field(
        WatchSpec(), description="hang limits, alert thresholds, log collection and metrics"
    )
    preflight: PreflightSpec = Field(
        PreflightSpec(), description="checks of the nodes before a run uses them"
    )
    drill: DrillSpec = Field(DrillSpec(), description="faults injected on purpose")
    env: dict[str, str] = Field(
        {}, description="further environment variables of the workers; secrets belong in env_from"
    )
    env_from: dict[str, SecretSource] = Field(
        {},
        description="environment variables with secret values, each with the place where its "
        "value is kept",
    )
    log_path: str | None = Field(
        None, description="folder for the workers' logs; default: the node's scratch folder"
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="peak TFLOP/s of one device, for MFU; default: from a table of "
        "known devices, otherwise a measured matmul",
    )

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > MAX_USER_VARIABLES:
            raise ValueError(f"{len(value)} variables, at most {MAX_USER_VARIABLES} are allowed")
        _check_names(value)
        return value

    @field_validator("env_from")
    @classmethod
    def _check_env_from(cls, value: dict[str, SecretSource]) -> dict[str, SecretSource]:
        _check_names(value)
        return value

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        both = sorted(self.env.keys() & self.env_from.keys())
        if both:
            raise ValueError(f"{both[0]} is in env and in env_from, leave one out")
        for part in self.worker.command or ():
            for name in self.env_from:
                if re.search(rf"(?<!\$)\$(?:{name}\b|\{{{name}\}})", part):
                    raise ValueError(
                        f"worker.command has ${name}, and all of the node see arguments: read the "
                        f"variable in the program, or in a shell as $${name}"
                    )
        return self

    @model_validator(mode="after")
    def _check_name_on_cluster(self) -> Self:
        if isinstance(self.engine, KubernetesEngineSpec) and self.run_id.endswith("-"):
            raise ValueError(
                f"run_id={self.run_id} ends with '-', which no object's name may there"
            )
        return self

    @model_validator(mode="after")
    def _check_init_from(self) -> Self:
        spec = self.init_from
        if spec is not None and self.worker.is_command:
            raise ValueError("init_from is for sessions: a command loads its checkpoints itself")
        if spec is not None and spec.run == self.run_id:
            raise ValueError(f"init_from.run={spec.run} is this run, name another one")
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        try:
            layout = self.layout
        except ValueError as error:
            raise ValueError(f"parallelism: {error}") from None
        if self.is_reference and not self.parallelism.is_default:
            sizes = "tensor, pipeline, context, expert and optimizer_weight_shard_size"
            raise ValueError(
                f"parallelism: {sizes} are for programs of your own, the built-in trainer is "
                "data-parallel: leave them out, or name your worker.recipe or worker.command"
            )
        if not self.worker.is_command and self.worker.script is None:  # whose batch is its own
            _check_batch(self.batch, layout)
        return self

    @model_validator(mode="after")
    def _check_partner_copies(self) -> Self:
        copies = self.checkpoint.partner_copies
        if not copies:
            return self
        name = f"checkpoint.partner_copies={copies}"
        if self.worker.is_command:
            raise ValueError(f"{name} is for sessions: a command saves its checkpoints itself")
        if copies >= self.engine.nodes:
            raise ValueError(
                f"{name} needs more than {copies} nodes, engine.nodes={self.engine.nodes}: every "
                "copy lies on another node"
            )
        if not self.restart.pod_retries:
            raise ValueError(
                f"{name} needs restart.pod_retries of 1 or more: without it all containers are "
                "replaced when a node is lost, and their memory with them"
            )
        return self

    @model_validator(mode="after")
    def _check_output_quiet(self) -> Self:
        if self.watch.output_quiet_s is None:
            return self
        if not self.worker.is_command:
            raise ValueError("watch.output_quiet_s is for commands: a session has heartbeats")
        if not self.restart.hang:
            raise ValueError("watch.output_quiet_s needs restart.hang=true, which looks for hangs")
        return self

    @model_validator(mode="after")
    def _check_of_sessions(self) -> Self:
        settings = {"parallelism.bucket_cap_mb": self.parallelism.bucket_cap_mb}
        if self.data is not None:
            settings["data.persistent_workers"] = self.data.persistent_workers
        for name, value in settings.items():
            if value is not None and self.worker.is_command:
                raise ValueError(
                    f"{name} changes nothing for worker.command, which wraps its model and reads "
                    "its data itself: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_hang_action(self) -> Self:
        action = self.watch.hang_action
        if action is HangAction.ALERT and not self.restart.hang:
            raise ValueError(
                f"watch.hang_action={action} needs restart.hang=true, which looks for hangs"
            )
        return self

    @model_validator(mode="after")
    def _check_upload(self) -> Self:
        spec, engine = self.worker.checkpoints, self.engine
        if spec is None or not spec.upload or engine.nodes == 1:
            return self
        if spec.kind is CheckpointKind.TORCHTITAN:
            raise ValueError(
                f"worker.checkpoints.upload with kind={spec.kind} is for one node, engine.nodes="
                f"{engine.nodes}: every rank reads the files of all; save to storage that all have"
            )
        names = string.Template(spec.path).get_identifiers()
        if self.saves_in_parts and engine.on_this_machine and "PERDURE_NODE" not in names:
            raise ValueError(
                f"worker.checkpoints.path={spec.path} is one folder, engine.nodes={engine.nodes}: "
                "with upload each node has a part of its own; put ${PERDURE_NODE} into the path, "
                "or leave out upload"
            )
        return self

    @model_validator(mode="after")
    def _check_session_job(self) -> Self:
        if self.worker.is_command:
            if self.restart.every_s is not None and self.worker.checkpoints is None:
                raise ValueError(
                    f"restart.every_s={self.restart.every_s:g} needs worker.checkpoints: when a "
                    "command has saved is not known"
                )
            return self
        if self.worker.script is not None and "steps" not in self.model_fields_set:
            raise ValueError("steps is missing: worker.script needs the step to train up to")
        if self.data is None and self.worker.recipe is None and self.worker.script is None:
            raise ValueError(
                "data is missing: without worker.command, worker.script or a worker.recipe of your "
                "own, data.sources names the corpus"
            )
        _check_world(self)
        return self

    @model_serializer(mode="wrap")
    def _without_a_target_of_nobody(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A command ends by itself: a default must not come back as a target that somebody has set.
        document: dict[str, Any] = dump(self)
        if self.target_step is None:
            document.pop("steps", None)
        return document

    @property
    def target_step(self) -> int | None:
        """The step at which the run is complete; None for a command whose job does not name it."""
        is_given = not self.worker.is_command or "steps" in self.model_fields_set
        return self.steps if is_given else None

    @property
    def saves_in_parts(self) -> bool:
        """Whether each node uploads a part of its own of every checkpoint of a command."""
        spec = self.worker.checkpoints
        is_uploaded = spec is not None and spec.upload and spec.kind.is_in_parts
        return is_uploaded and self.engine.nodes > 1

    @property
    def recipe(self) -> str:
        """The session recipe in effect, as module:function."""
        own = SCRIPT_RECIPE if self.worker.script is not None else self.worker.recipe
        return own or DEFAULT_RECIPE

    @property
    def is_reference(self) -> bool:
        """Whether the built-in trainer runs, so that `model` describes what is trained."""
        return not self.worker.is_command and self.recipe == DEFAULT_RECIPE

    @property
    def world_size(self) -> int:
        """Number of processes that agents start: one per slot, of a launcher one per node."""
        # A command such as torchrun starts the ranks of its node by itself.
        return self.engine.nodes if self.worker.is_launcher else self.engine.world_size

    @property
    def layout(self) -> ParallelLayout:
        """How the ranks are laid out; a session may bring a layout of its own instead."""
        return self.parallelism.layout(self.engine.world_size)

    @property
    def has_layout(self) -> bool:
        """Whether the job says how the ranks of a program of its own are laid out."""
        return not self.parallelism.is_default


def _check_names(variables: Iterable[str]) -> None:
    for name in variables:
        if name == GRACE:
            raise ValueError(
                f"{name} is set by the node agent, give restart.failover_grace_s instead"
            )
        if name == "MASTER_PORT":
            raise ValueError(f"{name} is set by the node agent, give comm.master_port instead")
        if name.startswith(RESERVED_PREFIXES) or name in RESERVED_NAMES | OVERWRITTEN_NAMES:
            raise ValueError(f"{name} is set by the node agent, choose another name")


def _check_batch(batch: BatchSpec, layout: ParallelLayout) -> None:
    if batch.global_batch_size % (layout.dp * batch.micro_batch_size):
        ranks = "world size" if layout.dp == layout.world_size else "data-parallel size"
        raise ValueError(
            f"batch.global_batch_size={batch.global_batch_size} must be divisible by {ranks} "
            f"x micro_batch_size = {layout.dp} x {batch.micro_batch_size}"
        )


def _check_world(job: Job) -> None:
    """What does not fit a session of this many ranks."""
    world = job.engine.world_size
    if job.parallelism.kind is ParallelKind.DATA_PARALLEL and world != 1:
        raise ValueError(
            f"parallelism.kind=data_parallel is one process: engine.nodes x slots_per_node = "
            f"{world} must be 1"
        )
    sharded = job.parallelism.kind in (ParallelKind.FSDP2, ParallelKind.HSDP)
    if sharded and job.precision is Precision.FP16:
        raise ValueError(
            f"precision=fp16 with parallelism.kind={job.parallelism.kind}: use bf16 or fp32"
        )
    if job.optimizer.warmup_steps > job.steps:
        raise ValueError(
            f"optimizer.warmup_steps={job.optimizer.warmup_steps} must not exceed steps={job.steps}"
        )


class JobTemplate(Job):
    """The job of a flow run, whose name is filled in when the flow run starts."""

    run_id: str = Field(
        description="name of the run: a-z, 0-9 and -, with fields for schedules: nightly-{date}, "
        "{time}, {n}",
        pattern=TEMPLATE,
    )

    @classmethod
    def of(cls, job: Job) -> Self:
        """A job that has its name already."""
        return cls.model_validate(job.model_dump())

    def named(self, run_id: str) -> Job:
        """The job of one run.

        Raises:
            InputError: no run can have this name.
        """
        return parse_job({**self.model_dump(), "run_id": run_id})


AnyJob = TypeVar("AnyJob", bound=Job)


def departures(job: Job, num_parameters: int | None) -> Iterator[str]:
    """Where a job departs from the recommended settings, one line each.

    Args:
        job: to look at.
        num_parameters: of its model; None: not known, so that no interval is recommended.
    """
    yield from _temporary_places(job)
    if job.worker.is_command:
        return
    if job.checkpoint.has_interval and num_parameters is not None:
        recommended = recommended_interval(num_parameters)
        for field, value in recommended.items():
            if not _within(getattr(job.checkpoint, field), value):
                yield (
                    f"checkpoint: {_interval_text(job.checkpoint)}; recommended for "
                    f"{num_parameters / 1e6:,.1f} M parameters: {field}={value}"
                )
    if job.checkpoint.keep_last < RECOMMENDED_KEEP_LAST:
        yield f"checkpoint.keep_last={job.checkpoint.keep_last}; recommended: 5"
    if not job.restart.hang:
        yield "restart.hang=false: a hang will not be noticed; recommended: true"
    limit_s = job.restart.hang_timeout_s
    if limit_s is not None and limit_s > PLATFORM_HANG_TIMEOUT_S:
        yield f"restart.hang_timeout_s={limit_s:g} is longer than the platform's 30 minutes"
    if job.parallelism.kind is ParallelKind.DATA_PARALLEL:
        yield "parallelism.kind=data_parallel: one process drives all cards; ddp is faster"


def _temporary_places(job: Job) -> Iterator[str]:
    address, folder = job.storage.address, job.storage.folder
    if folder is not None and is_temporary(folder):
        yield f"storage.address={address} is temporary: all of the run is gone after a reboot"
    if job.log_path is not None and is_temporary(Path(job.log_path)):
        yield f"log_path={job.log_path} is temporary: logs are gone after a reboot"


def is_temporary(path: Path) -> bool:
    """Whether what lies there is not expected to outlast a reboot."""
    return any(map(path.is_relative_to, TEMPORARY_FOLDERS))


def _within(chosen: int | None, recommended: int) -> bool:
    # Over 10B parameters the recommendation is a range, 100 to 200 steps.
    low = 100 if recommended == 200 else recommended
    return chosen is not None and low <= chosen <= recommended


def _interval_text(spec: CheckpointSpec) -> str:
    fields = ("every_steps", "every_epochs", "every_s", "mtbf_s")
    return ", ".join(f"{f}={getattr(spec, f)}" for f in fields if getattr(spec, f) is not None)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a YAML or JSON job file; `overrides` are `dotted.key=value` (value is YAML).

    Args:
        path: of the file.
        overrides: set before the job is validated.

    Raises:
        InputError: the first problem found, naming field, value and what is allowed.
    """
    return _loaded(Job, Path(path), overrides)


def load_template(path: Path, overrides: Sequence[str] = ()) -> JobTemplate:
    """The same for the job of a deployment, whose run_id may have fields."""
    return _loaded(JobTemplate, path, overrides)


def _loaded(kind: type[AnyJob], path: Path, overrides: Sequence[str]) -> AnyJob:
    document = read_document_file(path)
    if not isinstance(document, dict):
        raise InputError(str(path), "must be a mapping of job fields")
    for override in overrides:
        _set_override(document, override)
    job = _validated(kind, document)
    refuse_secrets(job)
    return job


def refuse_secrets(job: Job) -> None:
    """Check that the job, which others read, holds no secret.

    Raises:
        InputError: it does; names the variable, never the value.
    """
    for name, value in job.env.items():
        why = why_secret(name, value)
        if why is not None:
            raise InputError(
                f"env.{name}",
                f"{why}, and a job holds no secrets: name where it is kept, env_from: "
                f"{{{name}: {{secret: VARIABLE}}}}, or {{file: PATH}}, or {{block: NAME}}",
            )
    if isinstance(job.engine, KubernetesEngineSpec):
        for name, value in pod_rules.literal_variables(job.engine.pod):
            why = why_secret(name, value)
            if why is not None:
                raise InputError(
                    f"engine.pod: {name}",
                    f"{why}, and a job holds no secrets: name a Secret of the cluster, "
                    "valueFrom: {secretKeyRef: ...}, or engine.env_secrets",
                )
    if any(has_key(part) for part in job.worker.command or ()):
        raise InputError(
            "worker.command", "holds a key: use env_from, and read the variable in the program"
        )


def parse_job(document: Mapping[str, Any]) -> Job:
    """Validate a job given as a mapping.

    Raises:
        InputError: the first problem found, naming field, value and what is allowed.
    """
    return _validated(Job, document)


def parse_template(document: Mapping[str, Any]) -> JobTemplate:
    """Validate the job of a flow run, whose run_id may have fields.

    Raises:
        InputError: the first problem found, naming field, value and what is allowed.
    """
    return _validated(JobTemplate, document)


def _validated(kind: type[AnyJob], document: Mapping[str, Any]) -> AnyJob:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise input_error(error) from None


def input_error(error: ValidationError) -> InputError:
    """The first problem of a job, on one line; no values from where secrets may be."""
    first = error.errors(include_url=False)[0]
    return InputError(field_of(first["loc"]), message_of(first, Job))


def _set_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError("--set", f"{override!r} is not of the form key=value")
    *parents, leaf = key.split(".")
    target = document
    for parent in parents:
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise InputError("--set", f"{key}: {parent} is not a section")
        target = child
    target[leaf] = read_document(text, where=f"--set: {key}")
