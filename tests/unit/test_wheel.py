"""What an installation gets: one package, with everything that is in the folders linked into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.wheel import FOLDERS, build_wheel, copy_checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> ZipFile:
    return ZipFile(build_wheel(checkout, tmp_path_factory.mktemp("wheel") / "out"))


def packaged(wheel: ZipFile) -> set[str]:
    """Its files, without those about it."""
    return {name for name in wheel.namelist() if not Path(name).parts[0].endswith(".dist-info")}


def files_below(folder: Path, *, called: str) -> Iterator[str]:
    """Every file below a folder, by its name in a wheel; no link is followed."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield f"{called}/{path.relative_to(folder).as_posix()}"


def test_the_wheel_has_every_file_of_the_checkout_in_one_package(checkout, wheel):
    expected = set(files_below(checkout / "perdure", called="perdure"))
    for name in FOLDERS:
        expected |= set(files_below(checkout / name, called=f"perdure/{name}"))
    assert packaged(wheel) == expected


def test_no_other_name_is_taken_from_the_programs_of_users(wheel):
    assert {Path(name).parts[0] for name in packaged(wheel)} == {"perdure"}
    (top_level,) = [name for name in wheel.namelist() if name.endswith("top_level.txt")]
    assert wheel.read(top_level).split() == [b"perdure"]


def test_data_files_and_the_mark_for_type_checkers_are_there(wheel):
    assert {
        "perdure/py.typed",
        "perdure/training/__init__.py",
        "perdure/training/diagnosis/codes.toml",
        "perdure/training/diagnosis/rules/ascend.toml",
        "perdure/training/recovery/chips.toml",
    } <= packaged(wheel)
    rules = [name for name in packaged(wheel) if "/rules/" in name]
    assert len(rules) >= 10


def test_a_checkout_whose_links_were_lost_is_noticed_by_its_files(checkout, tmp_path):
    # As an archive that was unpacked without links has them: files with the name of their aim.
    broken = copy_checkout(tmp_path / "checkout")
    for name in FOLDERS:
        (broken / "perdure" / name).unlink()
        (broken / "perdure" / name).write_text(f"../{name}")
    lost = packaged(ZipFile(build_wheel(broken, tmp_path / "out")))
    assert "perdure/__init__.py" in lost
    assert not [name for name in lost if name.startswith("perdure/training/")]
