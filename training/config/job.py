"""The job: the pydantic specification of a run, made of the sections in `perdure.training.config`.

The JSON schema of `Job` is the parameter form of the Prefect deployments. Times
are seconds, sizes bytes, steps completed optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
from perdure.storage.frozen_model import SettingsModel
from perdure.training.config.command import (
    RESERVED_PREFIXES,
    CheckpointKind,
    ProgramCheckpointsSpec,
    check_variables,
)
from perdure.training.config.document import check_document
from perdure.training.config.drill import OF_ANY_FRAMEWORK, DrillSpec
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
    ParallelSpec,
    Precision,
    TokenizerSpec,
)
from perdure.training.config.preparation import PrepareSpec
from perdure.training.config.reading import field_of, message_of
from perdure.training.config.recovery import (
    CheckpointSpec,
    CommSpec,
    RestartSpec,
)
from perdure.training.config.run_name import NAME, TEMPLATE, InitFromSpec
from perdure.training.config.secrets import SecretSource
from perdure.training.config.watch import PreflightSpec, WatchSpec
from perdure.training.errors import InputError
from perdure.training.platforms.forms import GRACE
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.recovery.rungs import RUNGS, Rung, Scope

MAX_USER_VARIABLES = 100  # ModelArts' limit for own environment variables of a training job
RESERVED_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"})
# Each attempt's own, whatever was there before: the job's would be lost.
OVERWRITTEN_NAMES = frozenset(
    {
        *("MASTER_ADDR", "GROUP_RANK"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    }
)


POD_RETRIES = 3  # on a cluster
# Where the job, or its platform, says how often it is rescheduled, it says so of pods, too.
_OTHERS = frozenset({"pod_retries", "from_platform", "max_restarts", "unconditional"})


def _with_pod_retries(document: Any) -> Any:
    """Have a cluster replace a lost pod alone: whatever is given back may be somebody else's."""
    if not isinstance(document, dict):
        return document
    engine, restart = document.get("engine"), document.get("restart", {})
    is_cluster = isinstance(engine, dict) and engine.get("kind") == "kubernetes"
    if not is_cluster or not isinstance(restart, dict) or restart.keys() & _OTHERS:
        return document
    return {**document, "restart": {"pod_retries": POD_RETRIES, **restart}}


class Job(SettingsModel):
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
    prepare: PrepareSpec | None = Field(
        None, description="command that prepares data before the program starts"
    )
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
        LocalEngineSpec(),
        description="source of the nodes: this machine, "
        "a Kubernetes cluster, or whoever has given them",
    )
    watch: WatchSpec = Field(
        WatchSpec(), description="hang limits, alert thresholds, log collection and metrics"
    )
    preflight: PreflightSpec = Field(
        PreflightSpec(), description="checks of the nodes before a run uses them"
    )
    drill: DrillSpec = Field(DrillSpec(), description="faults injected on purpose")
    env: dict[str, str] = Field(
        {},
        description="further environment variables of the workers; in those of a command, "
        "${MASTER_ADDR}, ${MASTER_PORT} and the like are filled in; secrets belong in env_from",
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

    @model_validator(mode="before")
    @classmethod
    def _check_document(cls, document: Any) -> Any:
        check_document(document)
        return _with_pod_retries(document)

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > MAX_USER_VARIABLES:
            raise ValueError(f"{len(value)} variables, at most {MAX_USER_VARIABLES} are allowed")
        check_variables(value)
        _check_names(value)
        return value

    @field_validator("env_from")
    @classmethod
    def _check_env_from(cls, value: dict[str, SecretSource]) -> dict[str, SecretSource]:
        check_variables(value.keys())
        _check_names(value)
        return value

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        duplicates = sorted(self.env.keys() & self.env_from.keys())
        if duplicates:
            raise ValueError(f"{duplicates[0]} is in env and in env_from, leave one out")
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
        if self.init_from is not None:
            self.init_from.check_run(self.run_id, is_command=self.worker.is_command)
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
            self.batch.check_ranks(layout)
        return self

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        engine, is_command = self.engine, self.worker.is_command
        self.checkpoint.check_partners(
            nodes=engine.nodes, is_command=is_command, pod_retries=self.restart.pod_retries
        )
        self.watch.check_hang_rules(is_command=is_command, detects_hangs=self.restart.hang)
        if self.worker.checkpoints is not None:
            self.worker.checkpoints.check_upload(
                nodes=engine.nodes, on_this_machine=engine.on_this_machine
            )
        return self

    @model_validator(mode="after")
    def _check_prepare(self) -> Self:
        is_session = not self.worker.is_command
        if self.prepare is None or self.prepare.per == "run" or not is_session:
            return self
        if self.restart.node_replace:
            raise ValueError(
                "prepare.per=node needs restart.node_replace=false: a node that joins a living "
                "attempt is not prepared"
            )
        return self

    @model_validator(mode="after")
    def _check_session_settings(self) -> Self:
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
    def _check_session_job(self) -> Self:
        if self.worker.is_command:
            if self.restart.every_s is not None and self.worker.checkpoints is None:
                raise ValueError(
                    f"restart.every_s={self.restart.every_s:g} needs worker.checkpoints: when a "
                    "command has saved is not known"
                )
            return self
        if self.worker.is_mindspore:
            _check_mindspore(self)
        if self.worker.script is not None and "steps" not in self.model_fields_set:
            raise ValueError("steps is missing: worker.script needs the step to train up to")
        if self.data is None and self.worker.recipe is None and self.worker.script is None:
            raise ValueError(
                "data is missing: without worker.command, worker.script or a worker.recipe of your "
                "own, data.sources names the corpus"
            )
        self.parallelism.check_session(self.engine.world_size, self.precision)
        self.optimizer.check_steps(self.steps)
        return self

    @model_serializer(mode="wrap")
    def _dump_without_default_target(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
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
    def program_checkpoints(self) -> ProgramCheckpointsSpec | None:
        """The checkpoints of a command, with defaults that other sections give."""
        spec = self.worker.checkpoints
        if spec is None or spec.kind is not CheckpointKind.MINDFORMERS:
            return spec
        saves_at_end = bool(re.search(r"\bTTP\s*:\s*1\b", self.env.get("MS_ENABLE_TFT", "")))
        defaults = {"ranks": self.engine.world_size, "end_of_life": saves_at_end}
        missing = {k: value for k, value in defaults.items() if getattr(spec, k) is None}
        return spec.model_copy(update=missing)

    @property
    def saves_in_parts(self) -> bool:
        """Whether each node uploads a part of its own of every checkpoint of a command."""
        spec = self.worker.checkpoints
        is_uploaded = spec is not None and spec.upload and spec.kind.is_in_parts
        return is_uploaded and self.engine.nodes > 1

    @property
    def recipe(self) -> str:
        """The session recipe in effect, as module:function."""
        recipe = SCRIPT_RECIPE if self.worker.script is not None else self.worker.recipe
        return recipe or DEFAULT_RECIPE

    def possible(self, rungs: frozenset[Rung]) -> frozenset[Rung]:
        """Leave out the rungs that the framework of the ranks cannot carry out.

        MindSpore's process groups cannot be formed again in a living process.
        """
        if not self.worker.is_mindspore or self.worker.is_command:
            return rungs
        return frozenset(rung for rung in rungs if RUNGS[rung].scope is not Scope.PROCESSES)

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
                f"{name} is set by the node agent, give it in restart.from_platform instead"
            )
        if name == "MASTER_PORT":
            raise ValueError(f"{name} is set by the node agent, give comm.master_port instead")
        if name.startswith(RESERVED_PREFIXES) or name in RESERVED_NAMES | OVERWRITTEN_NAMES:
            raise ValueError(f"{name} is set by the node agent, choose another name")


class JobTemplate(Job):
    """The job of a flow run, whose name is filled in when the flow run starts."""

    run_id: str = Field(
        description="name of the run: a-z, 0-9 and -, with fields for schedules: nightly-{date}, "
        "{time}, {n}",
        pattern=TEMPLATE,
    )

    @classmethod
    def of(cls, job: Job) -> Self:
        """Make a template of a job that has its name already."""
        return cls.model_validate(job.model_dump())

    def named(self, run_id: str) -> Job:
        """Fill the name into the job of a run.

        Raises:
            InputError: no run can have this name.
        """
        return parse_job({**self.model_dump(), "run_id": run_id})


def _check_mindspore(job: Job) -> None:
    """Refuse what takes a rank back to a step inside its process, and what needs torch."""
    restart = job.restart
    settings = {
        "restart.numeric_retry": restart.numeric_retry,
        "restart.data_skipping": restart.data_skipping,
        "init_from": job.init_from is not None,
        **{
            f"drill.faults[{n}].kind={fault.kind}": fault.kind not in OF_ANY_FRAMEWORK
            for n, fault in enumerate(job.drill.faults)
        },
    }
    for name, is_set in settings.items():
        if is_set:
            raise ValueError(f"{name} is not for worker.integration=mindspore: leave it out")


AnyJob = TypeVar("AnyJob", bound=Job)


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
    """Describe the first problem of a job on a line; no values from where secrets may be."""
    first = error.errors(include_url=False)[0]
    return InputError(field_of(first["loc"]), message_of(first, Job))
