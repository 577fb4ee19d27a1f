"""The versions of driver, CANN, torch_npu and torch, from files, and whether they fit each other.

The table of torch_npu and CANN is data, versions.toml, with its source. Driver and toolkit name
the versions that they go with in their own version files. Nothing is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from perdure.training.telemetry.nvml import driver_version
from perdure.training.telemetry.vendor_tools import read_assignments
from perdure.training.wire.node import Check, CheckOutcome

NAME = "versions"
_DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
_TOOLKIT_FILE = "ascend_toolkit_install.info"
_DEFAULT_TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest"


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed versions; None or empty for software that is missing.

    Attributes:
        driver: lines of the driver's version file.
        toolkit: lines of the version file of CANN.
    """

    python: str
    torch: str
    torch_npu: str | None
    driver: Mapping[str, str]
    toolkit: Mapping[str, str]
    nvidia_driver: str | None = None


@cache
def cann_versions() -> Mapping[str, tuple[str, ...]]:
    """Load the CANN versions that fit, by torch_npu version."""
    document = tomllib.loads((Path(__file__).parent / "versions.toml").read_text(encoding="utf-8"))
    return {name: tuple(fits) for name, fits in document["cann_of_torch_npu"].items()}


def read_installed() -> Installed:
    """Read the versions on this machine."""
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    base = Path(home or _DEFAULT_TOOLKIT)
    files = [base / f"{platform.machine()}-linux" / _TOOLKIT_FILE, base / _TOOLKIT_FILE]
    return Installed(
        python=platform.python_version(),
        torch=_package_version("torch") or "missing",
        torch_npu=_package_version("torch_npu"),
        driver=read_assignments(_DRIVER_FILE),
        toolkit=next((versions for file in files if (versions := read_assignments(file))), {}),
        nvidia_driver=driver_version(),
    )


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(software: Installed) -> tuple[Check, ...]:
    """Check that the versions fit each other; all nodes must have the same versions."""
    parts = {
        "python": software.python,
        "torch": software.torch,
        "torch_npu": software.torch_npu,
        "CANN": software.toolkit.get("version"),
        "Ascend driver": software.driver.get("Version"),
        "NVIDIA driver": software.nvidia_driver,
    }
    text = ", ".join(f"{name} {version}" for name, version in parts.items() if version)
    check = Check(name=NAME, outcome=CheckOutcome.OK, seen=text, allowed="the same on every node")
    return check, _check_fit(software)


def _check_fit(software: Installed) -> Check:
    if software.torch_npu is None:
        return Check(
            name="npu_versions", outcome=CheckOutcome.SKIPPED, seen="torch_npu is not installed"
        )
    wrong, doubtful = [], []
    base = ".".join(software.torch_npu.split(".")[:3])
    if not software.torch.startswith(base):
        wrong.append(f"torch_npu {software.torch_npu} needs torch {base}, not {software.torch}")
    cann, fits = software.toolkit.get("version"), cann_versions().get(software.torch_npu)
    if fits is None:
        doubtful.append(f"torch_npu {software.torch_npu} is not in the table of known pairs")
    elif cann is not None and cann.upper() not in fits:
        doubtful.append(f"torch_npu {software.torch_npu} goes with CANN {' or '.join(fits)}")
    if cann is None:
        doubtful.append(f"no {_TOOLKIT_FILE}: CANN's version is not known")
    if software.driver and software.toolkit and not driver_fits(software.driver, software.toolkit):
        doubtful.append("neither driver nor CANN names the other one's version")
    return Check(
        name="npu_versions",
        outcome=CheckOutcome.FAILED
        if wrong
        else CheckOutcome.WARNING
        if doubtful
        else CheckOutcome.OK,
        seen="; ".join([*wrong, *doubtful]) or f"torch_npu {software.torch_npu}, CANN {cann}",
        allowed="a pair of training/node_checks/versions.toml",
    )


def driver_fits(driver: Mapping[str, str], toolkit: Mapping[str, str]) -> bool:
    """Whether driver or toolkit names the inner version of the other.

    `compatible_version=[V100R001C13],[V100R001C15,V100R001C19]`: versions, and ranges of them.
    """
    return _names_version(driver, toolkit.get("innerversion", "")) or _names_version(
        toolkit, driver.get("Innerversion", "")
    )


def _names_version(versions: Mapping[str, str], inner: str) -> bool:
    other = _parse_release(inner)
    for span in re.findall(r"\[([^\]]*)\]", versions.get("compatible_version", "")):
        ends = [
            release for part in span.split(",") if (release := _parse_release(part)) is not None
        ]
        if other is not None and ends and min(ends) <= other <= max(ends):
            return True
    return False


def _parse_release(text: str) -> tuple[int, ...] | None:
    """Parse a release: V100R001C13B222 is (100, 1, 13)."""
    match = re.match(r"\s*V(\d+)R(\d+)C(\d+)", text)
    return tuple(map(int, match.groups())) if match else None
