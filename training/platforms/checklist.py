"""Foreign documents of fault tolerance as sections of a job: what becomes of each of their fields.

Two forms are read, also mixed: the document of annotations (a manifest, or name to text), and the
checklist that guides hand out as a Python dictionary, `fault_tolerance_config = {...}`. The names
of a checklist are no standard: the table knows the usual ones, at any depth, and the rest is
reported, never dropped in silence. Steps are completed optimizer steps.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.training.errors import InputError
from perdure.training.platforms.forms import ENTRIES, IGNORED_ENTRIES, read_platform

CHECKLIST = "fault_tolerance_config"
FROM_PLATFORM = "restart.from_platform"
LOG_LEVEL = "env.ASCEND_GLOBAL_LOG_LEVEL"
_LOG_LEVELS = {"debug": 0, "info": 1, "warning": 2, "warn": 2, "error": 3, "none": 4, "off": 4}
# Names around fields that say nothing about them.
_FRAMES = frozenset(
    {CHECKLIST, "metadata", "spec", "config", "annotations", "labels", "env", "environments"}
)

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ImportedField:
    """A field of the document, with what became of it.

    Attributes:
        name: as the document has it, with the names around it.
        field: of the job; None: it sets none.
        result: the value of that field, or why there is none.
        sets: fields of the policy that an entry of a platform sets.
    """

    name: str
    value: Scalar | list[Any]
    field: str | None
    result: Any
    sets: str = ""

    @property
    def text(self) -> str:
        """The field for people."""
        value = json.dumps(self.value, ensure_ascii=False)
        became = f"{self.field}={json.dumps(self.result)}" if self.field else self.result
        return f"{self.name}: {value} -> {became}{f' (sets {self.sets})' if self.sets else ''}"


@dataclass(frozen=True, slots=True)
class ImportedDocument:
    """A document as sections of a job.

    Attributes:
        sections: for the job file.
        fields: in the order of the document.
        warnings: of the entries of platforms.
    """

    sections: dict[str, Any]
    fields: tuple[ImportedField, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """A field of the job that fields of a checklist set.

    Attributes:
        names: of the checklist, in lower case with underscores.
        read: reads the value; raises ValueError with what is allowed.
    """

    field: str
    names: tuple[str, ...]
    read: Callable[[Any], Any]


def _bool(value: Any) -> bool:
    words = {"true": True, "on": True, "yes": True, "1": True}
    words |= {"false": False, "off": False, "no": False, "0": False}
    if str(value).strip().lower() not in words:
        raise ValueError("true or false")
    return words[str(value).strip().lower()]


def _number(value: Any) -> float:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", text):
        raise ValueError("a number of 0 or more")
    return float(text)


def _count(value: Any) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ValueError("a whole number")
    return int(number)


def _log_level(value: Any) -> str:
    level = _LOG_LEVELS.get(str(value).strip().lower())
    if level is None and str(value).strip() in {"0", "1", "2", "3", "4"}:
        level = int(value)
    if level is None:
        raise ValueError(f"one of {', '.join(_LOG_LEVELS)}")
    return str(level)


def _minutes(value: Any) -> float:
    return 60.0 * _number(value)


def _text_number(value: Any) -> str:
    return str(_count(value))


_TARGETS = (
    _Target("restart.max_restarts", (
        "job_retry_num", "max_restarts", "max_restart", "max_restart_count", "max_restart_times",
        "max_retries", "max_retry", "max_retry_count", "retry_num", "retry_times", "restart_times",
        "job_max_retries", "restart_max_restarts", "restart_max_retries", "retry_max_retries",
    ), _count),
    _Target("restart.unconditional", (
        "unconditional_retry", "job_unconditional_retry", "unconditional_restart", "unconditional",
        "auto_restart", "enable_auto_restart", "auto_restart_enabled", "restart_enabled",
        "restart_unconditional",
    ), _bool),
    _Target("restart.hang", (
        "hang_retry", "hang_restart", "restart_on_hang", "hang_detection", "enable_hang_detection",
        "hang_detection_enabled", "hang_detect", "hang_enabled", "hang", "hang_retry_enabled",
    ), _bool),
    _Target("restart.hang_timeout_s", (
        "hang_timeout", "hang_timeout_s", "hang_timeout_seconds", "hang_detection_timeout",
        "hang_detect_timeout", "hang_detection_timeout_s", "hang_detection_timeout_seconds",
    ), _number),
    _Target("restart.hang_timeout_s", (
        "hang_timeout_minutes", "hang_timeout_min", "ma_hang_detect_time", "hang_detect_time",
        "hang_detection_timeout_minutes", "hang_detection_minutes",
    ), _minutes),
    _Target("restart.pod_retries", (
        "pod_retry_num", "pod_retries", "pod_max_retries", "max_pod_retries", "restart_pod_retries",
    ), _count),
    _Target("restart.in_place", (
        "in_place", "in_place_restart", "in_place_recovery", "inplace_restart", "inplace_recovery",
        "process_restart", "enable_in_place", "in_place_enabled",
    ), _bool),
    _Target("restart.failover_grace_s", (
        "failover_grace_s", "termination_grace_period", "termination_grace_period_seconds",
        "grace_period", "grace_period_s", "grace_period_seconds",
    ), _number),
    _Target("restart.memory_retry", ("uce", "enable_uce", "memory_retry", "uce_retry"), _bool),
    _Target("restart.collective_retry", ("hcce", "enable_hcce", "collective_retry"), _bool),
    _Target("restart.process_replace", (
        "arf", "enable_arf", "process_replace", "process_rescheduling", "process_reschedule",
    ), _bool),
    _Target("restart.end_of_life_checkpoint", (
        "ttp", "enable_ttp", "end_of_life_checkpoint", "last_checkpoint", "dying_gasp",
        "save_on_failure", "checkpoint_save_on_failure", "checkpoint_on_failure",
        "emergency_checkpoint",
    ), _bool),
    _Target("restart.numeric_retry", ("tre", "enable_tre", "numeric_retry"), _bool),
    _Target("restart.abnormal_grad_norm", (
        "abnormal_grad_norm", "grad_norm_threshold", "global_norm_threshold", "max_grad_norm_alarm",
        "gradient_norm_threshold",
    ), _number),
    _Target("comm.op_retry.enabled", (
        "hccl_op_retry", "op_retry", "operator_retry", "enable_op_retry", "hccl_op_retry_enable",
    ), _bool),
    _Target("checkpoint.every_steps", (
        "checkpoint_interval", "checkpoint_interval_steps", "checkpoint_every_steps", "save_steps",
        "save_interval", "save_interval_steps", "ckpt_interval", "ckpt_save_interval",
        "checkpoint_save_interval", "checkpoint_steps", "checkpoint_frequency", "checkpoint_freq",
        "save_checkpoint_steps", "checkpoint_save_steps",
    ), _count),
    _Target("checkpoint.every_s", (
        "checkpoint_interval_s", "checkpoint_interval_seconds", "save_interval_seconds",
        "save_interval_s", "checkpoint_every_s", "save_checkpoint_seconds",
    ), _number),
    _Target("checkpoint.every_s", (
        "checkpoint_interval_minutes", "checkpoint_interval_min", "save_interval_minutes",
    ), _minutes),
    _Target("checkpoint.keep_last", (
        "keep_last", "checkpoint_keep_last", "max_checkpoints", "checkpoint_keep",
        "keep_checkpoints", "save_total_limit", "keep_checkpoint_max", "max_to_keep",
        "checkpoint_max_to_keep", "keep_last_n", "checkpoint_keep_last_n", "max_keep_ckpts",
        "checkpoint_save_total_limit", "checkpoint_max_keep", "checkpoint_max_checkpoints",
    ), _count),
    _Target("engine.nodes", ("nodes", "num_nodes", "nnodes", "node_count"), _count),
    _Target("engine.slots_per_node", (
        "slots_per_node", "nproc_per_node", "devices_per_node", "npus_per_node", "cards_per_node",
    ), _count),
    _Target("engine.spares", (
        "spares", "spare_nodes", "num_spares", "backup_nodes", "standby_nodes",
    ), _count),
    _Target("env.HCCL_CONNECT_TIMEOUT", ("hccl_connect_timeout",), _text_number),
    _Target("env.HCCL_EXEC_TIMEOUT", ("hccl_exec_timeout",), _text_number),
    _Target("env.HCCL_EVENT_TIMEOUT", ("hccl_event_timeout",), _text_number),
    _Target("comm.buffsize_mb", ("hccl_buffsize",), _count),
    _Target(LOG_LEVEL, (
        "log_level", "ascend_global_log_level", "ascend_log_level", "logging_level", "logs_level",
        "logging_log_level",
    ), _log_level),
)  # fmt: skip
_BY_NAME = {name: target for target in _TARGETS for name in target.names}
# Names of what Perdure does in any case, or learns by itself.
_ALWAYS = {
    **dict.fromkeys(
        (
            "auto_resume", "resume", "resume_training", "enable_resume", "enable_auto_resume",
            "resume_from_checkpoint", "load_checkpoint", "checkpoint_auto_resume",
            "checkpoint_resume", "checkpoint_enabled", "enable_checkpoint", "save_checkpoint",
        ),
        "always so: every start goes on from the newest whole checkpoint",
    ),
    **dict.fromkeys(
        ("async_save", "async_checkpoint", "checkpoint_async", "checkpoint_async_save"),
        "always so: training goes on while a save is uploaded",
    ),
    **dict.fromkeys(
        (
            "checkpoint_path", "checkpoint_dir", "save_path", "save_dir", "ckpt_path", "ckpt_dir",
            "checkpoint_save_path", "checkpoint_save_dir", "output_dir",
        ),
        "is storage.address, or worker.checkpoints.path for the saves of a command",
    ),
    **dict.fromkeys(
        ("heartbeat_interval", "heartbeat_timeout", "health_check_interval", "monitor_interval"),
        "has no counterpart: the agents poll by themselves, and limits follow the step time",
    ),
    **dict.fromkeys(
        ("log_dir", "log_path", "logs_dir", "logging_log_dir"),
        "is log_path of the job",
    ),
}  # fmt: skip


def import_fields(document: Mapping[str, Any]) -> ImportedDocument:
    """Import each field of a foreign document.

    Raises:
        InputError: a value is not allowed, or two fields contradict each other.
    """
    entries: dict[str, str] = {}
    fields: list[ImportedField] = []
    sections: dict[str, Any] = {}
    for path, value in list_leaves(document):
        key = path[-1]
        if key in ENTRIES or key in IGNORED_ENTRIES:
            entries[key] = _entry_text(value)
            fields.append(_keep_entry(key, value, entries[key]))
            continue
        imported = _import_field(path, value)
        fields.append(imported)
        if imported.field is not None:
            put_field(sections, imported.field, imported.result, imported.name)
    reading = read_platform(entries)
    read_entries = {key: entry for key, entry in entries.items() if key in ENTRIES}
    if read_entries:
        sections.setdefault("restart", {})["from_platform"] = read_entries
    return ImportedDocument(sections, tuple(fields), tuple(reading.warnings))


def list_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """List the values of a document with the names around them."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        content = _named_values(inner)
        is_frame = str(key) in _FRAMES and isinstance(content, dict)
        yield from list_leaves(content, path if is_frame else (*path, str(key)))


def _named_values(value: Any) -> Any:
    """Turn the list form of variables, [{name: ..., value: ...}], into a mapping."""
    parts = value if isinstance(value, list) else []
    if parts and all(isinstance(part, dict) and {"name", "value"} <= part.keys() for part in parts):
        return {part["name"]: part["value"] for part in parts}
    return value


def _entry_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keep_entry(key: str, value: Any, entry: str) -> ImportedField:
    if key in IGNORED_ENTRIES:
        return ImportedField(key, value, None, IGNORED_ENTRIES[key])
    return ImportedField(key, value, f"{FROM_PLATFORM}.{key}", entry, ENTRIES[key].becomes)


def _import_field(path: tuple[str, ...], value: Any) -> ImportedField:
    name = ".".join(path)
    # The whole path first: `checkpoint: {interval: 500}` is a checkpoint_interval.
    keys = ["_".join(path[start:]) for start in range(len(path))]
    keys = [re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_") for key in keys]
    for key in keys:
        if key in _BY_NAME:
            target = _BY_NAME[key]
            try:
                return ImportedField(name, value, target.field, target.read(value))
            except ValueError as error:
                raise InputError(name, f"{value!r} must be {error}") from None
        if key in _ALWAYS:
            return ImportedField(name, value, None, _ALWAYS[key])
    near = difflib.get_close_matches(keys[0], sorted(_BY_NAME), n=1, cutoff=0.85)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ImportedField(name, value, None, f"has no counterpart{hint}")


def put_field(sections: dict[str, Any], field: str, value: Any, name: str) -> None:
    """Set a field of the job, which no other field of the document may set otherwise."""
    section, *inner, last = field.split(".")
    place = sections.setdefault(section, {})
    for part in inner:
        place = place.setdefault(part, {})
    if place.setdefault(last, value) != value:
        raise InputError(name, f"sets {field}={value!r}, another field sets {place[last]!r}")
