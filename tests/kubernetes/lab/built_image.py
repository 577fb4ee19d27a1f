"""The image of the Dockerfile, built on this machine by Debian's buildah, without a registry.

It stands on a base of Debian's own Python, as `python:3.12-slim` does elsewhere: what matters of
a base is that it has python3 and pip. pip takes its packages in there from where it takes them
here. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.kubernetes.lab.build import RELEASE, mirror
from tests.kubernetes.lab.network import outside
from tests.kubernetes.lab.places import REPO, ROOT

NAME = "lab.local/perdure-built:1"
NEEDED = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}  # programs, by package of Debian
EXTRAS = "kubernetes,ha"  # as docs/kubernetes.md has it for machines without NPUs
BUILD_S = 1200.0
_BASE_NAME = "localhost/python-base:1"
_BASE = ROOT / "python-base.tar"
# Debian's pip refuses to install beside Debian's packages; images of Python have no such rule.
_BASE_FILE = """\
FROM scratch
ADD python-base.tar /
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
"""


def missing() -> str:
    """How to get what the build needs and this machine lacks, or ""."""
    lacking = [package for name, package in NEEDED.items() if shutil.which(name) is None]
    return f"apt-get install --no-install-recommends {' '.join(lacking)}" if lacking else ""


def build_image(folder: Path) -> Path:
    """Build the image from this checkout.

    Args:
        folder: empty, for what the build writes: 7 GB while it lasts.

    Returns:
        An archive in Docker's form, which containerd imports under NAME.

    Raises:
        RuntimeError: a command failed; its output is in a file.
    """
    _have_base()
    context = folder / "base"
    context.mkdir()
    (context / "Containerfile").write_text(_BASE_FILE)
    (context / _BASE.name).hardlink_to(_BASE)
    _buildah(folder, "build", "--isolation=chroot", f"--tag={_BASE_NAME}", str(context))
    settings = pip_settings()
    config = folder / "pip.conf"
    lines = [f"{name} = {' '.join(value.split())}\n" for name, value in settings.items()]
    config.write_text("".join(["[global]\n", *lines]))
    volumes = {"/etc/pip.conf": config} | {str(path): path for path in pip_paths(settings)}
    _buildah(
        folder,
        *("build", "--isolation=chroot", f"--tag={NAME}", "--pull-never"),
        *("--build-arg", f"BASE_IMAGE={_BASE_NAME}", "--build-arg", f"EXTRAS={EXTRAS}"),
        *(f"--volume={path}:{target}:ro" for target, path in volumes.items()),
        str(REPO),
    )
    archive = folder / "perdure.tar"
    _buildah(folder, "push", NAME, f"docker-archive:{archive}:{NAME}")
    return archive


def _have_base() -> None:
    """Make the base's file system, once per machine: 20 s."""
    if _BASE.exists():
        return
    part = _BASE.with_suffix(".part.tar")
    source = f"deb {mirror()} {RELEASE} main"
    include = "--include=python3,python3-pip"
    command = ["mmdebstrap", "--variant=minbase", "--mode=root", include, RELEASE, str(part)]
    _run([*command, source], ROOT / "python-base.log")
    part.rename(_BASE)


def pip_settings() -> Mapping[str, str]:
    """This machine's settings of pip: those of its files, and over them those of PIP_ variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [line.partition("=") for line in listed.splitlines()]
    named = [(name.rpartition("."), ast.literal_eval(value)) for name, _, value in found]
    of_files = {name: value for (part, _, name), value in named if part == "global"}
    return of_files | {name: value for (part, _, name), value in named if part == ":env:"}


def pip_paths(settings: Mapping[str, str]) -> list[Path]:
    """The files and folders of this machine that settings of pip name."""

    def named() -> Iterator[Path]:
        for word in (word for value in settings.values() for word in value.split()):
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # The pages of an index lie beside the files that they name.
                yield path.parent if path.name == "simple" else path

    return sorted(set(named()))


def _buildah(folder: Path, *arguments: str) -> None:
    store = (f"--root={folder / 'store'}", f"--runroot={folder / 'run'}", "--storage-driver=vfs")
    _run(["buildah", *store, *arguments], folder / f"{arguments[0]}.log")


def _run(command: list[str], log: Path) -> None:
    line = outside(*command)  # tests live in the hub, from where no package is reached
    with log.open("wb") as output:
        done = subprocess.run(line, stdout=output, stderr=output, timeout=BUILD_S, check=False)
    if done.returncode != 0:
        said = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command[:1])} failed; see {log}: {said}")
