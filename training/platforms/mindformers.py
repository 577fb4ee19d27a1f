"""The YAML configuration of MindSpore Transformers as sections of a job.

Each field is read, or named with the reason why it sets nothing. Fields of recovery (those of
monitor_config, use_skip_data_by_global_norm) are entries of `restart.from_platform`. The sizes of
parallel_config are those of `parallelism`, and output_dir says where checkpoints are. All else is
the program's own.

Source: mindformers 1.9.0, tools/register/template.py, and configs of its documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from perdure.training.errors import InputError
from perdure.training.platforms.checklist import (
    FROM_PLATFORM,
    ImportedDocument,
    ImportedField,
    list_leaves,
    put_field,
)
from perdure.training.platforms.forms import ENTRIES, read_platform

# A document with any of these is the configuration of a training.
_SIGNS = frozenset({"runner_config", "parallel_config", "monitor_config", "use_legacy_format"})
DEFAULT_OUTPUT = "./output"
CHECKPOINT_FOLDER = "checkpoint"
_SIZES = {
    "parallel_config.model_parallel": "parallelism.tensor",
    "parallel_config.pipeline_stage": "parallelism.pipeline",
    "parallel_config.context_parallel": "parallelism.context",
    "parallel_config.expert_parallel": "parallelism.expert",
    "parallel.parallel_optimizer_config.optimizer_weight_shard_size": (
        "parallelism.optimizer_weight_shard_size"
    ),
}
_EVERY_START = "a start after a fault gets --load_checkpoint and --resume_training"
_SET_NOTHING = {
    "load_checkpoint": f"is for the first start; {_EVERY_START}",
    "checkpoint.load_path": f"is for the first start; {_EVERY_START}",
    "resume_training": f"is for the first start; {_EVERY_START}",
    "resume_by_last_timestamp_ckpt": "is ignored: checkpoints count when all ranks have them",
    "parallel_config.data_parallel": "follows from the number of ranks and the other sizes",
    "runner_config.epochs": "is read from the output, as the target",
    "runner_config.sink_mode": "is read from the output: a step is printed per sink",
    "use_graceful_exit": "is not needed: SIGTERM ends a command, and its newest checkpoint stays",
    "use_legacy_format": "is not needed: both layouts of checkpoints are found",
    "callbacks": "are the program's own; it saves and deletes checkpoints as they say",
    "trainer": "is the program's own",
}
_OF_PROGRAM = "is the program's own"


def is_configuration(document: Mapping[str, Any]) -> bool:
    """Whether a document is the configuration of a training of MindSpore Transformers."""
    return bool(_SIGNS & document.keys())


def import_configuration(document: Mapping[str, Any]) -> ImportedDocument:
    """Import each field of a configuration.

    Raises:
        InputError: a value is not allowed, or two fields contradict each other.
    """
    sections = _command_sections(document)
    fields = list(_import_leaves(document))
    entries: dict[str, str] = {}
    for field in fields:
        if field.field is None or field.field == "worker.checkpoints.path":
            continue
        section, _, name = field.field.rpartition(".")
        if section == FROM_PLATFORM:
            entries[name] = field.result
        else:
            put_field(sections, field.field, field.result, field.name)
    reading = read_platform(entries)
    if entries:
        sections["restart"] = {"from_platform": entries}
    return ImportedDocument(sections, tuple(fields), tuple(reading.warnings))


def _command_sections(document: Mapping[str, Any]) -> dict[str, Any]:
    folder = _checkpoint_folder(document)
    return {
        "worker": {
            "progress": {"kind": "mindformers"},
            "checkpoints": {"kind": "mindformers", "path": folder},
            "resume": {"args": ["--load_checkpoint", folder, "--resume_training", "True"]},
        }
    }


def _checkpoint_folder(document: Mapping[str, Any]) -> str:
    output = document.get("output_dir") or DEFAULT_OUTPUT
    if not isinstance(output, str):
        raise InputError("output_dir", f"{output!r} must be the name of a folder")
    return str(PurePosixPath(output) / CHECKPOINT_FOLDER)


def _import_leaves(document: Mapping[str, Any]) -> Iterator[ImportedField]:
    for path, value in list_leaves(document):
        name, key = ".".join(path), path[-1]
        if name == "output_dir":
            folder = _checkpoint_folder(document)
            yield ImportedField(name, value, "worker.checkpoints.path", folder)
        elif name in _SIZES:
            yield ImportedField(name, value, _SIZES[name], _size(name, value))
        elif key in ENTRIES and path[0] in ("monitor_config", key):
            yield ImportedField(
                name, value, f"{FROM_PLATFORM}.{key}", str(value), ENTRIES[key].becomes
            )
        else:
            why = _SET_NOTHING.get(name) or _SET_NOTHING.get(path[0]) or _OF_PROGRAM
            yield ImportedField(name, value, None, why)


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(name, f"{value!r} must be a whole number of 1 or more")
    return value
