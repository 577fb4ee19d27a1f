"""The lab's container images, made from nothing: no registry is asked.

A pod of the image of Perdure mounts the files of this machine, as `host_files` names them.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.kubernetes.lab.places import IMAGE, IMAGES, PAUSE_IMAGE

COMPILER_S = 240.0
FOLDERS = (
    *("usr", "etc", "proc", "sys", "dev", "run", "var", "root", "home", "opt", "srv", "mnt"),
    *("tmp", "var/tmp", "var/lib", "var/log"),
)
# As on a system whose /usr is merged; /var/run is where Kubernetes puts a pod's token.
LINKS = {
    "bin": "usr/bin",
    "sbin": "usr/sbin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "var/run": "/run",
}
# PostgreSQL runs as no user without a name, and not as root.
ACCOUNTS = {
    "etc/passwd": "root:x:0:0::/root:/bin/bash\n"
    "postgres:x:999:999::/var/lib/postgresql:/bin/bash\n"
    "perdure:x:1000:1000::/home/perdure:/bin/bash\n"
    "nobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\npostgres:x:999:\nperdure:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAYOUT = "application/vnd.oci.image"


def make_images() -> list[Path]:
    """Write the archives that containerd imports. Returns their paths."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    pause = IMAGES / "pause"
    source = Path(__file__).with_name("pause.c")
    subprocess.run(
        ["gcc", "-static", "-O1", "-o", str(pause), str(source)], check=True, timeout=COMPILER_S
    )
    archives = {"pause.tar": (PAUSE_IMAGE, {"pause": pause.read_bytes()}, ["/pause"])}
    files = {name: text.encode() for name, text in ACCOUNTS.items()}
    archives["perdure.tar"] = (IMAGE, files, [])
    for file, (name, content, entrypoint) in archives.items():
        _write_archive(IMAGES / file, name, _layer(content), entrypoint)
    return [IMAGES / file for file in archives]


def _layer(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in FOLDERS:
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if "tmp" in folder else 0o755
            tar.addfile(info)
        for link, target in LINKS.items():
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for name, content in files.items():
            _add(tar, name, content, mode=0o755 if name == "pause" else 0o644)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _described(kind: str, content: bytes) -> dict[str, object]:
    return {
        "mediaType": f"{LAYOUT}.{kind}",
        "digest": f"sha256:{_digest(content)}",
        "size": len(content),
    }


def _write_archive(path: Path, name: str, layer: bytes, entrypoint: list[str]) -> None:
    """An image of one layer in the OCI layout, which containerd imports under its name."""
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "Env": [f"PATH={PATH}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{LAYOUT}.manifest.v1+json",
            "config": _described("config.v1+json", config),
            "layers": [_described("layer.v1.tar", layer)],
        }
    ).encode()
    entry = _described("manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name}
    with tarfile.open(path, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        for content in (layer, config, manifest):
            _add(tar, f"blobs/sha256/{_digest(content)}", content)
