"""The checks of a job before anything is started, and whether its settings allow recovery.

Storage, corpus, tokenizer and environment take seconds at most; every problem is an InputError
that names field, value and the allowed values. A layout that does not allow a recovery inside the
processes is a note, not a problem: the ladder skips a rung that is not possible.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from perdure.storage.address import (
    Credentials,
    check_can_make,
    check_reachable,
    has_store,
    open_store,
)
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.commands.arguments import (
    NAMES_IN_ARGUMENTS,
    explain_unknown_name,
    find_unknown_names,
)
from perdure.training.config.job import RESERVED_NAMES, Job
from perdure.training.engines.registry import make_engine
from perdure.training.environment import (
    HOST_PORTS,
    TORCH_PORT,
    check_environment,
    variables_of,
    worker_path,
)
from perdure.training.errors import EngineError, InputError
from perdure.training.files import home_folder
from perdure.training.node_checks.limits import explain_few_files, explain_small_memory
from perdure.training.platforms.settings import format_value
from perdure.training.preflight.device_memory import check_device_memory
from perdure.training.preflight.mindspore import mindspore_notes
from perdure.training.preflight.program import check_recipe, script_notes
from perdure.training.preflight.storage import MOUNTS, check_place, place_of
from perdure.training.processes import LAUNCHER
from perdure.training.recovery.replicas import Feasibility, Mechanism, feasibility, groups_text
from perdure.training.supervisor.run_identity import refuse_vanished
from perdure.training.trainer.data.corpus import CorpusError, find_sources
from perdure.training.trainer.data.first_look import TooFewTokens, check_enough, strange_files
from perdure.training.trainer.data.tokenizer import open_tokenizer
from perdure.training.trainer.size import num_parameters
from perdure.training.wire.node import Check, CheckOutcome

MANY_SAVES_LOST = 0.25  # of all steps, to do again after the worst moment to fail


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job that this process may start: it passed `check_job`, or its attempt, which did, lives.

    Functions that start a run take this type, so the check cannot be forgotten or repeated.
    """

    job: Job

    @classmethod
    def of_living_attempt(cls, job: Job) -> Self:
        """A job whose attempt is adopted, whatever has become of its corpus or store."""
        return cls(job)


def use_default_chain(_job: Job) -> None:
    """No keys: boto3 finds them by its default chain."""


def check_job(
    job: Job, *, read_credentials: Callable[[Job], Credentials | None] = use_default_chain
) -> CheckedJob:
    """Check a job against this machine and its store.

    Args:
        job: valid by itself.
        read_credentials: returns the keys of the job's store, called once everything else is fine.

    Raises:
        InputError: the first problem.
    """
    check_without_store(job)
    credentials = read_credentials(job)
    _check_storage(job, credentials)
    _check_init_from(job, open_store(job.storage, credentials))
    return CheckedJob(job)


def check_without_store(job: Job) -> None:
    """Check a job against this machine alone; its store is neither written nor read.

    Raises:
        InputError: the first problem.
    """
    check_environment(job)
    _check_engine(job)
    _check_platform(job)
    if job.engine.on_this_machine:
        _check_program(job)
        _check_open_files(job)
    _check_place_of_store(job)
    if job.data is not None and not job.worker.is_command:
        _check_data(job)


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the user about the job's recovery.

    Attributes:
        is_warning: whether the job asked for something that is not possible.
    """

    line: str
    is_warning: bool = False


def recovery_notes(job: Job) -> tuple[Note, ...]:
    """Note which recoveries the layout allows, and how platform entries were read."""
    reading = job.restart.read_platform()
    from_platform = [
        Note(f"{name}={format_value(value)}: from {reading.sources[name]}")
        for name, value in reading.fields.items()
        if getattr(job.restart, name, value) == value  # the job's own value comes first
    ]
    return (
        *_start_notes(job),
        *_port_notes(job),
        *(_mechanism_note(job, mechanism) for mechanism in Mechanism),
        *_numeric_notes(job),
        *_copy_notes(job),
        *_wrapping_notes(job),
        *from_platform,
        *(Note(f"from_platform: {line}", is_warning=True) for line in reading.warnings),
    )


def _start_notes(job: Job) -> Iterator[Note]:
    """Warn of a launcher that is started once per device: it starts all ranks of the node."""
    if not job.worker.is_command or job.worker.is_launcher:
        return
    launcher = next((m for part in job.worker.command or () if (m := LAUNCHER.search(part))), None)
    if launcher is not None:
        why = "starts ranks of its own: per: node is for it"
        yield Note(f"worker.per=device: {launcher.group()} {why}", is_warning=True)


def _port_notes(job: Job) -> Iterator[Note]:
    """Warn of HCCL's ports where a program that sets no MASTER_PORT has its own."""
    base = int(variables_of(job)["HCCL_IF_BASE_PORT"])
    if base <= TORCH_PORT < base + HOST_PORTS:
        yield Note(
            f"HCCL_IF_BASE_PORT={base}: HCCL takes ports {base} to {base + HOST_PORTS - 1}, and "
            f"{TORCH_PORT} is torch's default MASTER_PORT: a program that uses it does not start; "
            "Perdure's default is 60000",
            is_warning=True,
        )


def _mechanism_note(job: Job, mechanism: Mechanism) -> Note:
    if not getattr(job.restart, mechanism):
        return Note(f"{mechanism}: off (restart.{mechanism}=false)")
    asked = mechanism in job.restart.model_fields_set
    can = feasibility(mechanism, job.layout, ranks_per_node=job.engine.slots_per_node)
    why = None
    if job.worker.is_command:
        why = "worker.command is not part of the recovery, a session recipe is"
    elif job.worker.is_mindspore:
        why = "MindSpore cannot form its process groups again in a living process"
    if why is not None:
        line = f"{mechanism}: not possible: {why}{_own_means(job, can)}"
        return Note(line, is_warning=asked)
    if can.is_possible:
        return Note(f"{mechanism}: possible, {can.reason}")
    return Note(f"{mechanism}: not possible: {can.reason}", is_warning=asked)


def _numeric_notes(job: Job) -> Iterator[Note]:
    """Warn of answers to abnormal steps that lack something."""
    spec = job.restart
    for name in ("numeric_retry", "data_skipping"):
        if not getattr(spec, name):
            continue
        if job.worker.is_command:
            why = "the steps of worker.command are not known, those of a session recipe are"
            yield Note(f"{name}: not possible: {why}", is_warning=True)
        elif spec.abnormal_loss is None and spec.abnormal_grad_norm is None:
            why = "no threshold, so that only nan and inf are abnormal; set abnormal_grad_norm"
            yield Note(f"{name}: {why}", is_warning=True)


def _copy_notes(job: Job) -> Iterator[Note]:
    """Note the benefit and the cost of copies on partner nodes."""
    spec = job.checkpoint
    if not spec.partner_copies:
        return
    limit = f", at {spec.partner_mb_per_s:g} MB/s" if spec.partner_mb_per_s is not None else ""
    yield Note(
        f"partner_copies: {spec.partner_copies} of each node's saves in the memory of other nodes"
        f"{limit}; a node needs {spec.shares_in_memory} times its share of the state"
    )
    domains = set(spec.failure_domains.values())
    if len(domains) == 1:
        yield Note(
            f"checkpoint.failure_domains: all of {domains.pop()!r}, so that the nodes named have "
            "partners among the others alone",
            is_warning=True,
        )


def _wrapping_notes(job: Job) -> Iterator[Note]:
    """Warn of settings of the built-in trainer that a recipe has to take over."""
    needs = {
        "parallelism.bucket_cap_mb": (
            "perdure.training.trainer.pretrain.data_parallel",
            job.parallelism.bucket_cap_mb,
        )
    }
    if job.data is not None:
        needs["data.persistent_workers"] = (
            "perdure.training.trainer.pretrain.make_loader",
            job.data.persistent_workers,
        )
    for name, (helper, value) in needs.items():
        if value is not None and not job.is_reference:
            yield Note(
                f"{name}: changes nothing unless {job.recipe} uses {helper}", is_warning=True
            )


def _own_means(job: Job, can: Feasibility) -> str:
    """Say whether a command's layout allows its own recovery, such as MindIO TFT."""
    if not job.has_layout:
        return ""
    verb = "allows" if can.is_possible else "does not allow"
    return f"; a recovery of its own (MindIO TFT) its layout {verb}: {can.reason}"


def _check_place_of_store(job: Job) -> None:
    folder = job.storage.folder
    if folder is not None and not job.engine.has_folder(str(folder)):
        text = (
            f"{job.storage.address!r}: the job's nodes do not have that folder; mount it with "
            "engine.volumes, from where all of them share it, or take an s3:// address"
        )
        raise InputError("storage.address", text)


def _check_engine(job: Job) -> None:
    try:
        make_engine(job, home=home_folder(), epoch=0, secrets_env={}, created_s=0.0).nodes()
    except EngineError as error:
        raise InputError("engine", str(error)) from error


def _check_platform(job: Job) -> None:
    try:
        job.restart.read_platform(job.comm.settings())
    except InputError as error:
        raise InputError("restart.from_platform", str(error)) from error


def _check_program(job: Job) -> None:
    cwd = Path(job.worker.cwd or ".")
    if not cwd.is_dir():
        raise InputError("worker.cwd", f"{str(cwd)!r} is not a folder")
    if job.worker.command is not None:
        program = job.worker.command[0]
        # The agent fills in $variables, and has a PATH of its own, unless the job gives one.
        entries = job.env.get("PATH", worker_path()).split(os.pathsep)
        path = os.pathsep.join(str(cwd / entry) for entry in entries if entry)
        is_on_path = shutil.which(program, path=path) is not None
        if "$" not in program and not is_on_path and not (cwd / program).exists():
            raise InputError("worker.command", f"{program!r} is no program on this machine")
        _check_names("worker.command", job.worker.command, job)
        if job.worker.resume is not None:
            _check_names("worker.resume.args", job.worker.resume.args, job)
        if job.worker.checkpoints is not None:
            _check_names("worker.checkpoints.path", [job.worker.checkpoints.path], job)
        return
    if job.worker.script is not None and not (cwd / job.worker.script[0]).is_file():
        raise InputError("worker.script", f"{job.worker.script[0]!r} is no file in {str(cwd)!r}")
    python = job.worker.python
    if python is not None and shutil.which(cwd / python) is None:
        raise InputError("worker.python", f"{python!r} is no program on this machine")
    check_recipe(job.recipe, cwd)


def _check_open_files(job: Job) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if problem := explain_few_files(job, hard_limit=hard):
        raise InputError("", problem)


def _check_names(field: str, command: Sequence[str], job: Job) -> None:
    inherited = os.environ.keys() - RESERVED_NAMES  # of this process, not of the job's
    defined = {*inherited, *variables_of(job), *job.env_from, *NAMES_IN_ARGUMENTS}
    if not job.worker.is_launcher:
        defined |= RESERVED_NAMES
    for name in find_unknown_names(command, defined):
        raise InputError(field, explain_unknown_name(name, defined))


def _check_data(job: Job) -> None:
    assert job.data is not None  # noqa: S101 checked by the caller
    is_here = job.engine.on_this_machine  # else the files may be in the image alone
    try:
        sources = find_sources(job.data)
    except CorpusError as error:
        if not is_here:
            return
        raise InputError("data.sources", str(error)) from error
    try:
        tokenizer = open_tokenizer(job.tokenizer)
    except (ValueError, OSError) as error:
        if not is_here and isinstance(error, OSError):
            return
        raise InputError("tokenizer.path", str(error)) from error
    if not job.is_reference:
        return  # the length of its samples is the program's own affair
    try:
        check_enough(job.data, tokenizer, sources, num_tokens=job.model.seq_len + 1)
    except TooFewTokens as error:
        text = f"{job.model.seq_len}: {error}; take more text or shorter samples"
        raise InputError("model.seq_len", text) from error
    except CorpusError as error:
        raise InputError("data.sources", str(error)) from error


def start_warnings(job: Job) -> list[str]:
    """Warn of oddities of a job's program or corpus, each in a line."""
    if not job.engine.on_this_machine:
        return corpus_notes(job)  # the script of a command is in its image
    small_memory = explain_small_memory()
    machine = [small_memory] if small_memory is not None else []
    if job.worker.command is None:
        return [*machine, *corpus_notes(job)]
    cwd = Path(job.worker.cwd or ".")
    return [*machine, *script_notes(job.worker.command, cwd), *mindspore_notes(job, cwd)]


def corpus_notes(job: Job) -> list[str]:
    """List files of a session job's corpus that are no text, each in a line."""
    if job.data is None or job.worker.is_command:
        return []
    try:
        return list(strange_files(job.data))
    except CorpusError as error:
        if not job.engine.on_this_machine:
            return [f"data.sources: {error} on this machine; the supervisor's needs them"]
        raise InputError("data.sources", str(error)) from error


def _check_storage(job: Job, credentials: Credentials | None) -> None:
    spec = job.storage
    try:
        if has_store(spec):
            check_reachable(open_store(spec, credentials), f"runs/{job.run_id}/")
        else:
            refuse_vanished(job, home_folder())
            check_can_make(spec)
    except InputError:
        raise
    except (StorageError, ValueError) as error:
        raise InputError("storage.address", f"{spec.address!r}: {error}") from error


def _check_init_from(job: Job, store: ObjectStore) -> None:
    spec = job.init_from
    if spec is None:
        return
    try:
        has_runs = has_store(job.storage)
        if has_runs and CheckpointStore(store, job.run_id).latest() is not None:
            return  # it began long ago
        steps = CheckpointStore(store, spec.run).steps() if has_runs else []
    except StorageError as error:
        raise InputError("storage.address", f"{job.storage.address!r}: {error}") from error
    if not steps or (spec.step is not None and spec.step not in steps):
        raise InputError(*spec.missing(steps))


def checklist(job: Job) -> Iterator[Check]:
    """Judge each setting that recovery depends on."""
    if not job.worker.is_command:
        yield _interval(job)
        yield _retention(job)
    yield _restarts(job)
    yield _spares(job)
    yield _replicas(job)
    place = place_of(job.storage, MOUNTS.read_text(encoding="utf-8", errors="replace"))
    yield check_place(place, num_parameters(job))
    memory = check_device_memory(job)
    if memory is not None:
        yield memory


def _interval(job: Job) -> Check:
    spec = job.checkpoint
    allowed = f"at most {MANY_SAVES_LOST:.0%} of {job.steps} steps"
    if not spec.has_interval:
        choice = "none of the job's own: the recommended one for the model's size is taken"
        return _check("checkpoint_interval", CheckOutcome.OK, choice, allowed)
    chosen = [
        f"{name}={getattr(spec, name)}"
        for name in ("every_steps", "every_epochs", "every_s", "mtbf_s")
        if getattr(spec, name) is not None
    ]
    options = ", ".join(chosen)
    every = spec.every_steps
    if every is not None and every > job.steps:
        text = f"{options}: no save before the end, at step {job.steps}"
        return _check("checkpoint_interval", CheckOutcome.WARNING, text, allowed)
    if every is not None and every > MANY_SAVES_LOST * job.steps:
        text = f"{options}: a fault costs up to {every} of {job.steps} steps"
        return _check("checkpoint_interval", CheckOutcome.WARNING, text, allowed)
    if spec.every_s is not None and spec.mtbf_s is not None and spec.every_s > spec.mtbf_s:
        text = f"{options}: more time between saves than between failures"
        return _check("checkpoint_interval", CheckOutcome.WARNING, text, "every_s below mtbf_s")
    return _check("checkpoint_interval", CheckOutcome.OK, options, allowed)


def _retention(job: Job) -> Check:
    keep_last = job.checkpoint.keep_last
    outcome = CheckOutcome.OK if keep_last > 1 else CheckOutcome.WARNING
    why = "" if keep_last > 1 else ": a damaged one leaves nothing to go back to"
    return _check("retention", outcome, f"keep_last={keep_last}{why}", "more than one checkpoint")


def _restarts(job: Job) -> Check:
    spec = job.restart
    limits = (
        f"max_restarts={spec.max_restarts}, unconditional={spec.unconditional}, "
        f"in_place={spec.in_place}, hang={spec.hang}"
    )
    switches = ("max_restarts", "unconditional", "hang")
    off = [name for name in switches if not getattr(spec, name)]
    text = f"{limits}: {' and '.join(off)} off, some faults end the run" if off else limits
    outcome = CheckOutcome.WARNING if off else CheckOutcome.OK
    return _check("restart_policy", outcome, text, "every fault has an answer")


def _spares(job: Job) -> Check:
    spares = job.engine.spares
    outcome = CheckOutcome.OK if spares else CheckOutcome.WARNING
    why = "" if spares else ": a node that is isolated is not replaced"
    return _check("spares", outcome, f"spares={spares}{why}", "a spare node")


def _replicas(job: Job) -> Check:
    if job.worker.is_command and not job.has_layout:
        fact = "a command's state is not known: it is restarted from its own checkpoints"
        return _check("replicas", CheckOutcome.SKIPPED, fact)
    impossible = [note.line for note in recovery_notes(job) if note.is_warning]
    copies = job.layout.copies
    if impossible and not job.worker.is_command:
        return _check("replicas", CheckOutcome.WARNING, "; ".join(impossible))
    if copies == 1:
        figure = "one copy of every shard: a lost process costs the steps since the last save"
        return _check("replicas", CheckOutcome.WARNING, figure, "two copies or more")
    groups = f": {groups_text(job.layout.replica_groups())}" if job.has_layout else ""
    return _check(
        "replicas", CheckOutcome.OK, f"{copies} copies of every shard{groups}", "two copies or more"
    )


def _check(name: str, outcome: CheckOutcome, fact: str, allowed: str = "") -> Check:
    return Check(name=name, outcome=outcome, seen=fact, allowed=allowed)
