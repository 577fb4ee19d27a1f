"""The environment of the workers: HCCL and torch variables of a job, each with its reason.

Facts follow the HCCL environment variable reference (CANN) and torch_npu's documentation.
Units differ per variable and are part of the reason text.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.config.job_file import refuse_secrets
from perdure.training.config.recovery import RankTableForm, why_no_megabytes
from perdure.training.errors import InputError
from perdure.training.processes import PRELOAD, await_address, interface_of
from perdure.training.wire.node import VISIBLE, device_ids

# Added on top of HCCL_EXEC_TIMEOUT: the event wait must outlast the execution limit
# (torch_npu: HCCL_EVENT_TIMEOUT default 1868 against HCCL_EXEC_TIMEOUT default 1836).
_EVENT_MARGIN_S = 32
HOST_PORTS = 32
TORCH_PORT = 29_500  # torchrun's default of MASTER_PORT


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable with its value and the reason for it."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int
    unit: str


_RANGES: Mapping[str, _Range] = {
    "HCCL_BUFFSIZE": _Range(1, 4096, "MB, not bytes"),
    "HCCL_CONNECT_TIMEOUT": _Range(120, 7200, "seconds"),
    "HCCL_EXEC_TIMEOUT": _Range(0, 2_147_483_647, "seconds"),
    "HCCL_EVENT_TIMEOUT": _Range(0, 2_147_483_647, "seconds"),
    "HCCL_IF_BASE_PORT": _Range(1024, 65_520, "a port"),
    "HCCL_WHITELIST_DISABLE": _Range(0, 1, "0 or 1"),
    "ASCEND_GLOBAL_LOG_LEVEL": _Range(0, 4, "0 debug to 4 none"),
    "ASCEND_SLOG_PRINT_TO_STDOUT": _Range(0, 1, "0 or 1"),
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": _Range(0, 3, "a mode"),
    "OMP_NUM_THREADS": _Range(1, 4096, "threads"),
    "COMBINED_ENABLE": _Range(0, 1, "0 or 1"),
}
# By CANN's documents, which do not name the form for other series.
_SERIES_OF_FORM: Mapping[RankTableForm, tuple[str, ...]] = {
    RankTableForm.V1_0: ("a2", "a3"),
    RankTableForm.V1_2: ("a3",),
}
_OP_RETRY = re.compile(r"L[01]:[01](,\s*L[012]:[01])*")


def worker_variables(job: Job) -> list[Variable]:
    """List the variables of every worker of `job`, in the order of their output.

    The node agent adds what differs from rank to rank: the rendezvous, the ranks, and
    ASCEND_PROCESS_LOG_PATH, a folder beside the rank's own output, or below that of the job.
    """
    variables = [*_hccl(job), *_op_retry(job), *_torch(job), *_logs(), *_preload(job)]
    by_name = {name: Variable(name, value, "set by the job") for name, value in job.env.items()}
    return [by_name.pop(v.name, v) for v in variables] + list(by_name.values())


def variables_of(job: Job) -> dict[str, str]:
    """Map the same variables from name to value, as processes get them."""
    return {variable.name: variable.value for variable in worker_variables(job)}


def interface_variables(host: str) -> dict[str, str]:
    """Choose variables that keep a node's process groups on its address's network.

    Without them gloo listens on the address behind the name of the machine. Variables of the
    platform or the job come before them.

    Args:
        host: address of the node by the engine.
    """
    await_address(host)
    interface = interface_of(host)
    return {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}


def worker_path() -> str:
    """Build PATH of the workers: this Python's programs first, so that `torchrun` is its own."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def check_environment(job: Job) -> None:
    """Check the job's own variables for secrets, wrong units and excluded pairs.

    Raises:
        InputError: names the variable, its value and what is allowed.
    """
    refuse_secrets(job)
    _check_rank_table(job)
    for name, value in job.env.items():
        limits = _RANGES.get(name)
        if limits is None:
            continue
        why = why_no_megabytes(value) if name == "HCCL_BUFFSIZE" else None
        if why is not None:
            raise InputError(f"env.{name}", why)
        if not re.fullmatch(r"-?\d+", value) or not limits.low <= int(value) <= limits.high:
            raise InputError(
                f"env.{name}", f"{value!r} must be {limits.low} to {limits.high} ({limits.unit})"
            )
    _check_pairs(variables_of(job), job)


def _check_rank_table(job: Job) -> None:
    """Check the parts of a rank table that are known before any node reports its devices."""
    form, env = job.comm.rank_table, job.env
    if form is None:
        return
    if job.comm.chip is not None and job.comm.chip not in _SERIES_OF_FORM[form]:
        text = f"{form} is for chip {' or '.join(_SERIES_OF_FORM[form])}"
        raise InputError("comm.rank_table", f"{text}, and comm.chip={job.comm.chip}")
    if "RANK_TABLE_FILE" in {*env, *job.env_from}:
        section = "env" if "RANK_TABLE_FILE" in env else "env_from"
        text = f"comm.rank_table={form} writes that file, leave one of them out"
        raise InputError(f"{section}.RANK_TABLE_FILE", text)
    if VISIBLE in job.env_from:
        text = f"comm.rank_table={form} must know the devices: give them in env"
        raise InputError(f"env_from.{VISIBLE}", text)
    try:
        device_ids(job.engine.slots_per_node, env.get(VISIBLE, ""))
    except ValueError as error:
        raise InputError(f"env.{VISIBLE}", f"{error}; comm.rank_table={form} needs them") from error


def _check_pairs(values: Mapping[str, str], job: Job) -> None:
    execution_s, event_s = int(values["HCCL_EXEC_TIMEOUT"]), int(values["HCCL_EVENT_TIMEOUT"])
    if event_s and event_s <= execution_s:
        raise InputError(
            "env.HCCL_EVENT_TIMEOUT", f"{event_s} must exceed HCCL_EXEC_TIMEOUT={execution_s}"
        )
    base, master = int(values["HCCL_IF_BASE_PORT"]), job.comm.master_port
    if base <= master < base + HOST_PORTS:
        raise InputError(
            "env.HCCL_IF_BASE_PORT",
            f"ports {base} to {base + HOST_PORTS - 1} contain comm.master_port={master}",
        )
    _check_white_list(values)
    retry = values["HCCL_OP_RETRY_ENABLE"]
    if not _OP_RETRY.fullmatch(retry):
        raise InputError("env.HCCL_OP_RETRY_ENABLE", f'{retry!r} must look like "L0:0,L1:1,L2:0"')
    if ":1" in retry and not job.comm.op_retry.enabled:
        raise InputError(
            "env.HCCL_OP_RETRY_ENABLE", f"{retry!r}: use comm.op_retry.enabled, it checks the pairs"
        )


def _check_white_list(values: Mapping[str, str]) -> None:
    """Check that HCCL finds its list where it reads one, and reads a list that is set."""
    is_on, file = values["HCCL_WHITELIST_DISABLE"] == "0", values.get("HCCL_WHITELIST_FILE")
    if is_on and file is None:
        raise InputError("env.HCCL_WHITELIST_DISABLE", "0 needs HCCL_WHITELIST_FILE, the list")
    if file is not None and not is_on:
        text = f"{file!r} is not read with HCCL_WHITELIST_DISABLE=1, set that to 0"
        raise InputError("env.HCCL_WHITELIST_FILE", text)
    if file is not None and not file.startswith("/"):
        raise InputError("env.HCCL_WHITELIST_FILE", f"{file!r} must be an absolute path")


# Why the two limits are what they are, by comm.timeouts.
_CONNECT_WHY = {
    "standard": "a rescheduled node pulls its image meanwhile",
    "platform": "20 minutes, as the platforms' documents have it: on many nodes the last image "
    "and the last shard of data come late",
}
_EXEC_WHY = {
    "standard": "HCCL's default",
    "platform": "30 minutes, the platforms' limit of a hang, as their documents have it",
}


def _hccl(job: Job) -> Iterator[Variable]:
    comm = job.comm
    yield Variable(
        "HCCL_CONNECT_TIMEOUT", str(comm.timeouts_s.connect_s),
        f"seconds to wait for all ranks at link setup; {_CONNECT_WHY[comm.timeouts]}",
    )  # fmt: skip
    yield Variable(
        "HCCL_EXEC_TIMEOUT", str(comm.timeouts_s.exec_s),
        "seconds until a collective that waits for a dead rank fails (older series round down "
        f"to a multiple of 68); {_EXEC_WHY[comm.timeouts]}",
    )  # fmt: skip
    yield Variable(
        "HCCL_EVENT_TIMEOUT", str(_execution_s(job) + _EVENT_MARGIN_S),
        "seconds; must exceed HCCL_EXEC_TIMEOUT or the cause is masked",
    )  # fmt: skip
    yield Variable(
        "HCCL_BUFFSIZE", str(comm.buffsize_mb), "MB per buffer, two for each communicator"
    )
    yield Variable(
        "HCCL_IF_BASE_PORT", str(comm.if_base_port),
        f"first of {HOST_PORTS} host ports; reserve them with net.ipv4.ip_local_reserved_ports, "
        f"and keep MASTER_PORT out of them: {TORCH_PORT}, as some guides have it, is torch's own "
        "default of that",
    )  # fmt: skip
    yield Variable(
        "HCCL_WHITELIST_DISABLE", "1",
        "1: any address may connect, HCCL's default; 0 needs HCCL_WHITELIST_FILE, the list of "
        "addresses",
    )  # fmt: skip


def _execution_s(job: Job) -> int:
    """Return HCCL_EXEC_TIMEOUT in effect; a later check refuses a text that is no number."""
    text = job.env.get("HCCL_EXEC_TIMEOUT", "")
    return int(text) if text.isdecimal() else job.comm.timeouts_s.exec_s


def _op_retry(job: Job) -> Iterator[Variable]:
    retry = job.comm.op_retry
    flag = int(retry.enabled)
    yield Variable(
        "HCCL_OP_RETRY_ENABLE", f"L1:{flag},L2:{flag}",
        "operator retry between servers (L1) and super nodes (L2); Atlas A3 only, excludes MC2 "
        "and the watchdog",
    )  # fmt: skip
    if not retry.enabled:
        return
    yield Variable(
        "HCCL_OP_RETRY_PARAMS",
        f"MaxCnt:{retry.max_count},HoldTime:{retry.hold_time_ms},IntervalTime:{retry.interval_ms}",
        "retries, then milliseconds before the first and between them",
    )
    yield Variable("HCCL_OP_EXPANSION_MODE", "AI_CPU", "operator retry works in this mode only")


def _has_watchdog(job: Job) -> bool:
    """Whether an error of a collective must end its process."""
    if job.comm.watchdog is not None:
        return job.comm.watchdog
    return job.worker.is_command and not job.comm.op_retry.enabled


def _torch(job: Job) -> Iterator[Variable]:
    is_on = str(int(_has_watchdog(job)))
    yield Variable(
        "TORCH_HCCL_ASYNC_ERROR_HANDLING", is_on,
        "1: the watchdog ends a process whose peer is gone, so that the fault surfaces; 0: the "
        "process lives, and recovery goes on in it",
    )  # fmt: skip
    yield Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", is_on, "the same on cuda")
    yield Variable(
        "MULTI_STREAM_MEMORY_REUSE", "1",
        "torch_npu 2.13 otherwise has the watchdog alone keep the memory of a collective that "
        "nobody waits for, and without it others write into that while it runs",
    )  # fmt: skip
    yield Variable(
        "COMBINED_ENABLE", "1",
        "torch_npu copies a tensor behind two views (a slice of a transpose) in one operation; it "
        "has nothing to do with communication, as some guides have it",
    )  # fmt: skip
    yield Variable("OMP_NUM_THREADS", "1", "ranks of a node share its cores; also bit-exact sums")
    yield Variable(
        "PYTHONUNBUFFERED", "1", "the last lines before a death are in the log, not in a buffer"
    )


def _preload(job: Job) -> Iterator[Variable]:
    if job.worker.preload:
        names = ",".join(job.worker.preload)
        yield Variable(PRELOAD, names, "modules that a node imports once, worker.preload")


def _logs() -> Iterator[Variable]:
    yield Variable(
        "ASCEND_GLOBAL_LOG_LEVEL", "3", "errors only; info costs step time and fills the disk"
    )
