"""Small files that are whole or not there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from perdure.training.files import private_folder, write_whole


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path):
    path = tmp_path / "record.json"
    write_whole(path, "older")
    write_whole(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("name", ["address.json", "address.json.tmp"])
def test_a_private_file_is_for_its_owner_alone_whatever_was_there(tmp_path, name):
    (tmp_path / name).write_text("old")
    (tmp_path / name).chmod(0o644)
    path = tmp_path / "address.json"
    write_whole(path, "secret", private=True)
    assert (path.read_text(), mode_of(path)) == ("secret", 0o600)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = tmp_path / "record.json"
    write_whole(path, "old")
    (tmp_path / "record.json.tmp").mkdir()
    with pytest.raises(OSError, match="record"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_a_private_folder_is_closed_to_others_also_when_it_was_there(tmp_path):
    for folder in (tmp_path / "new" / "below", tmp_path / "old"):
        if folder.name == "old":
            folder.mkdir(mode=0o755)
        assert private_folder(folder) == folder
        assert mode_of(folder) == 0o700
