"""JSON of others that is nested without end: a line with its place, never a RecursionError."""

from __future__ import annotations

import pytest

from perdure.storage.errors import Corrupt
from perdure.storage.manifest import checksummed, parse_manifest
from perdure.storage.safetensors_file import LENGTH, parse_header
from perdure.training.agent.worker_process import read_error
from perdure.training.errors import InputError
from perdure.training.supervisor.job_registry import job_path, known_job

DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5_000 + b"]" * 5_000]


@pytest.mark.parametrize("text", DEEP)
def test_a_safetensors_header_is_corrupt(text):
    header = LENGTH.pack(len(text)) + text
    with pytest.raises(Corrupt, match="not a safetensors header"):
        parse_header(header, size_bytes=len(header), url="file:///a")


def test_a_manifest_is_corrupt():
    text = '{"version":1,"extra":' + "[" * 5000 + "]" * 5000 + "}"
    with pytest.raises(Corrupt, match="file:///a: not JSON"):
        parse_manifest(checksummed(text), url="file:///a")


@pytest.mark.parametrize("text", DEEP)
def test_the_job_of_a_run_is_no_job(tmp_path, text):
    path = job_path(tmp_path, "run-1")
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    with pytest.raises(InputError, match="is no job"):
        known_job(tmp_path, "run-1")


@pytest.mark.parametrize("text", DEEP)
def test_an_error_file_of_a_program_says_nothing(tmp_path, text):
    (tmp_path / "error.json").write_bytes(text)
    assert read_error(tmp_path / "error.json") == {}
