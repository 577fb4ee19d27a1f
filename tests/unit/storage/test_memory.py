"""What the limits of control groups leave of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.checkpoint_server.slots import UNLIMITED, cgroup_left_bytes

V1 = "12:cpu,cpuacct:/pod\n11:memory:/pod/container\n1:name=systemd:/pod\n0::/elsewhere\n"


def belong(root: Path, groups: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(groups)


def group_v2(root: Path, path: str, limit: str, used: int, cache: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def group_v1(root: Path, path: str, limit: int, used: int, cache: int) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {cache}\n")


def test_without_control_groups_nothing_is_limited(tmp_path):
    assert cgroup_left_bytes(tmp_path) == UNLIMITED
    belong(tmp_path, "0::/\n")
    assert cgroup_left_bytes(tmp_path) == UNLIMITED


def test_a_limit_leaves_what_is_not_used_and_the_page_cache(tmp_path):
    belong(tmp_path, "0::/pod\n")
    group_v2(tmp_path, "pod", "1000", 700, cache=200)
    assert cgroup_left_bytes(tmp_path) == 500


def test_a_group_above_its_limit_leaves_nothing(tmp_path):
    belong(tmp_path, "0::/pod\n")
    group_v2(tmp_path, "pod", "1000", 1200)
    assert cgroup_left_bytes(tmp_path) == 0


@pytest.mark.parametrize(("inner", "outer"), [("1000", "300"), ("300", "1000"), ("max", "300")])
def test_the_tightest_of_a_group_and_those_above_it_counts(tmp_path, inner, outer):
    belong(tmp_path, "0::/pod/container/step\n")
    group_v2(tmp_path, "pod", outer, 0)
    group_v2(tmp_path, "pod/container", inner, 0)
    assert cgroup_left_bytes(tmp_path) == 300


@pytest.mark.parametrize("path", ["/", "/docker/as-the-host-sees-it", "/../.."])
def test_a_container_that_sees_its_own_group_at_the_top_has_its_limit(tmp_path, path):
    belong(tmp_path, f"0::{path}\n")
    group_v2(tmp_path, "", "1000", 400)
    assert cgroup_left_bytes(tmp_path) == 600


def test_the_memory_controller_of_version_1_limits_too(tmp_path):
    belong(tmp_path, V1)
    group_v1(tmp_path, "", 9223372036854771712, 5000, 0)
    group_v1(tmp_path, "pod", 2000, 1800, 400)
    group_v1(tmp_path, "pod/container", 1000, 100, 0)
    assert cgroup_left_bytes(tmp_path) == 600
