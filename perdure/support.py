"""`perdure support`: one archive of all that is known about a run, for whoever helps.

The archive has what the store and this machine have, with secrets masked: the ledger, the job, the
status, a report of each fault, the logs of all attempts, and versions. CONTENTS.md says what each
file is, and which logs are missing. Times are seconds since the epoch, sizes bytes.
"""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from perdure.console import RunName
from perdure.log_reading import LogRow, all_rows, content_of, living_text, read_index
from perdure.logs import gaps
from perdure.monitor import RunMonitor
from perdure.runs import run_to_observe
from perdure.storage.errors import StorageError
from perdure.training.errors import InputError
from perdure.training.masking import mask_stream, secret_values
from perdure.training.reporting.fault_report import ReportPlace, fault_reports
from perdure.training.supervisor.run_handle import RunHandle

CONTENTS = "CONTENTS.md"
LIVING_LIMIT_BYTES = 64 << 20  # of one log of the living attempt, whose file has no limit yet
_PACKAGES = ("perdure", "torch", "torch_npu", "prefect", "numpy", "transformers", "mindspore")


@dataclass(frozen=True, slots=True)
class SupportFile:
    """One file of the archive.

    Attributes:
        meaning: of the file, for the table of contents.
        read: returns its content, before masking.
    """

    name: str
    meaning: str
    read: Callable[[], bytes]


def support(
    run: RunName,
    *,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="name of the archive; default: RUN-support.tar.gz here"),
    ] = None,
) -> None:
    """Write one archive about a run for whoever helps: ledger, reports and logs, masked."""
    observed = run_to_observe(run)
    if observed.refresh().job is None:
        raise InputError("run_id", f"{observed.job.run_id} has not been started")
    target = output or Path(f"{observed.job.run_id}-support.tar.gz")
    try:
        num_files = write_archive(observed, target, now_s=time.time())
    except OSError as error:
        raise InputError("--output", f"{target} cannot be written: {error.strerror}") from error
    print(f"{target}: {num_files} files, {decimal(target.stat().st_size)}; {CONTENTS} lists them")


def write_archive(run: RunHandle, target: Path, *, now_s: float) -> int:
    """Write the archive, and return the number of its files; the contents name what is unreadable.

    Raises:
        OSError: it cannot be written.
        StorageError: the store does not answer.
    """
    secrets = secret_values(os.environ) | secret_values(run.job.env)
    folder = target.name.removesuffix(".gz").removesuffix(".tar")
    rows: list[str] = []
    num_unreadable = 0
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for file in _files(run):
                try:
                    raw = file.read()
                except (OSError, EOFError, zlib.error, StorageError) as error:
                    problem = f"{file.meaning}: cannot be read: {type(error).__name__}"
                    rows.append(f"| `{file.name}` | - | {problem} |")
                    num_unreadable += 1
                    continue
                content = b"".join(mask_stream([raw], secrets))
                rows.append(f"| `{file.name}` | {decimal(len(content))} | {file.meaning} |")
                _add(archive, f"{folder}/{file.name}", content, now_s)
            contents = _contents(run, rows, now_s).encode()
            _add(archive, f"{folder}/{CONTENTS}", contents, now_s)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return len(rows) - num_unreadable + 1


def _add(archive: tarfile.TarFile, name: str, content: bytes, now_s: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(content), int(now_s), 0o600
    archive.addfile(info, io.BytesIO(content))


def _contents(run: RunHandle, rows: Sequence[str], now_s: float) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now_s))
    index = read_index(run.store, run.job.run_id)
    missing = [f"- {gap}\n" for gap in gaps(index, run.history, None)]
    parts = [
        (
            f"# Run {run.job.run_id}, written {written} UTC\n\n"
            "Secrets are masked as `***`. `perdure diagnose logs/` diagnoses the logs again.\n\n"
            "| file | size | what it is |\n|---|---|---|\n"
        ),
        *(f"{row}\n" for row in rows),
        *(["\n## Logs that are missing\n\n", *missing] if missing else ()),
    ]
    return "".join(parts)


def _files(run: RunHandle) -> Iterator[SupportFile]:
    """List the files, those to read first at the top."""
    run_id = run.job.run_id
    place = ReportPlace(run_id, run.store.url)
    history = run.history
    for report in fault_reports(history, place, recent=len(history.attempts)):
        body = f"# {report.title}\n\n{report.body}".encode()
        yield SupportFile(f"faults/{report.name}.md", report.title, partial(bytes, body))
    yield SupportFile("status.json", "`perdure status --json`", lambda: _status(run))
    yield SupportFile(
        "job.json", "the job, with its defaults", lambda: run.job.model_dump_json(indent=1).encode()
    )
    yield SupportFile("versions.txt", "of this machine, where the archive was written", _versions)
    ledger = f"runs/{run_id}/ledger/"
    for info in run.store.list(ledger):
        name = f"ledger/{info.key.removeprefix(ledger)}"
        yield SupportFile(name, "record of the ledger", partial(run.store.get, info.key))
    for row in all_rows(run, read_index(run.store, run_id)):
        yield _log_file(run, row)


def _log_file(run: RunHandle, row: LogRow) -> SupportFile:
    node = row.node or "all"
    name = f"logs/p{row.placement:04}-a{row.attempt:04}/{node}/{row.file}"
    cut = f", without its first {decimal(row.cut_bytes)}" if row.cut_bytes else ""
    meaning = f"log of {node}, attempt {row.placement}.{row.attempt}{cut}"
    if row.is_living:
        return SupportFile(name, meaning, lambda: end_of(living_text(run, row)))
    return SupportFile(name, meaning, lambda: content_of(run.store, row))


def end_of(pieces: Iterable[str], limit_bytes: int = LIVING_LIMIT_BYTES) -> bytes:
    """Return the text, without its first pieces where it is longer than the limit."""
    newest: deque[bytes] = deque()
    size_bytes = dropped_bytes = 0
    for piece in pieces:
        newest.append(piece.encode())
        size_bytes += len(newest[-1])
        while size_bytes > limit_bytes and len(newest) > 1:
            size_bytes -= len(newest[0])
            dropped_bytes += len(newest.popleft())
    head = f"[without the first {decimal(dropped_bytes)}]\n".encode() if dropped_bytes else b""
    return head + b"".join(newest)


def _status(run: RunHandle) -> bytes:
    return json.dumps(RunMonitor(run).snapshot().status.document, indent=1).encode()


def _versions() -> bytes:
    lines = [f"python {platform.python_version()}", f"{platform.platform()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "".join(f"{line}\n" for line in lines).encode()
