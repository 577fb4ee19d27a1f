"""Builds Kubernetes from Debian bookworm's own source package, once per machine.

No release of Debian has binary packages of the server side, and bookworm's is the last whose
sources are complete. What Debian does package (etcd, containerd, runc, network plugins, kubectl,
Go) is unpacked from there and not installed: that would start services on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.kubernetes.lab.places import CNI_PLUGINS, PROGRAMS, ROOT, VERSION

RELEASE = "bookworm"
SOURCE = "kubernetes"
BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
PACKAGED = ("containerd", "containerd-shim-runc-v2", "ctr", "etcd", "kubectl", "runc")
PLUGINS = ("bridge", "host-local", "loopback", "portmap")
PACKAGES = (
    *("etcd-server", "containerd", "runc", "containernetworking-plugins", "kubernetes-client"),
    *("golang-1.19-go", "golang-1.19-src"),
)
# The copy of 1.0.1 in the sources crashes in programs built with Go 1.18 or newer.
REFLECT = "golang-github-modern-go-reflect2-dev"
REFLECT_SOURCES = Path("github.com/modern-go/reflect2")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# What the build and the lab start, by the package of Debian that has it.
NEEDED = {
    "apt-get": "apt",
    "dpkg-source": "dpkg-dev",
    "make": "make",
    "rsync": "rsync",
    "gcc": "gcc libc6-dev",
    "curl": "curl",
    "ip": "iproute2",
    "iptables": "iptables",
    "dnsmasq": "dnsmasq-base",
    "sysctl": "procps",
    "nsenter": "util-linux",
}
WORK = ROOT / "build"
LOG = ROOT / "build.log"
STAMP = ROOT / "built"
BUILD_S = 3600.0


def missing() -> str:
    """The packages to install before the lab can be built and started, or ""."""
    return " ".join(package for name, package in NEEDED.items() if shutil.which(name) is None)


def obstacle() -> str:
    """Why the lab cannot be built or started on this machine, or ""."""
    if os.geteuid() != 0:
        return "it makes network namespaces, and needs root"
    if lacking := missing():
        return f"apt-get install --no-install-recommends {lacking}"
    if not is_built() and not mirror():
        return f"apt-get knows no packages of Debian {RELEASE}, from whose Kubernetes it is built"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "this machine lets nobody make namespaces"


def is_built() -> bool:
    """Whether all programs are there."""
    return STAMP.exists()


def build() -> None:
    """Have the programs of the lab. Takes about five minutes on two cores, and then nothing.

    Raises:
        RuntimeError: something is not there, or a command failed; its output is in a file.
    """
    if is_built():
        return
    if reason := obstacle():
        raise RuntimeError(reason)
    print(f"building Kubernetes {VERSION} from Debian's sources in {ROOT}: about five minutes")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    LOG.unlink(missing_ok=True)
    sources = _fetch()
    made = _compile(sources)
    _install(made)
    STAMP.write_text(f"{VERSION}\n")
    shutil.rmtree(WORK)  # 3 GB of sources and of Go's cache


def _fetch() -> Path:
    """Download and unpack everything. Returns the folder of Kubernetes' sources."""
    for name in ("lists/partial", "archives/partial", "packages"):
        (WORK / name).mkdir(parents=True)
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    source = f"{signed}{mirror()} {RELEASE} main"
    (WORK / "sources.list").write_text(f"deb {source}\ndeb-src {source}\n")
    _apt("update")
    _apt("source", "--download-only", SOURCE)
    sources = WORK / "sources"
    (description,) = WORK.glob(f"{SOURCE}_*.dsc")
    _run(["dpkg-source", "--extract", str(description), str(sources)])
    _apt("download", *PACKAGES, REFLECT)
    for package in sorted(WORK.glob("*.deb")):
        _run(["dpkg", "--extract", str(package), str(WORK / "packages")])
    _replace_reflect(sources)
    return sources


def mirror() -> str:
    """Where this machine gets the packages of the release from, "" if it does not."""
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    known = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in known.stdout.splitlines():
        address, release, component = line.split()
        if (release, component) == (RELEASE, "main"):
            return address
    return ""


def _replace_reflect(sources: Path) -> None:
    theirs = sources / "vendor" / REFLECT_SOURCES
    ours = WORK / "packages" / "usr" / "share" / "gocode" / "src" / REFLECT_SOURCES
    for file in (*theirs.glob("*.go"), *theirs.glob("*.s")):
        file.unlink()
    for file in (*ours.glob("*.go"), *ours.glob("*.s")):
        shutil.copy(file, theirs)


def _compile(sources: Path) -> Path:
    """Build the five programs. Returns their folder."""
    root = WORK / "packages" / "usr" / "lib" / "go-1.19"
    (WORK / "home").mkdir()
    # The build looks for itself below the path of Go.
    (sources / ".go" / "src" / "k8s.io").mkdir(parents=True)
    (sources / ".go" / "src" / "k8s.io" / "kubernetes").symlink_to(sources)
    environment = {
        **os.environ,
        "GOROOT": str(root),
        "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
        "HOME": str(WORK / "home"),
        "GOPATH": str(sources / ".go"),
        "GOCACHE": str(WORK / "cache"),
        "GOFLAGS": f"-p={os.cpu_count()}",
        "CGO_ENABLED": "0",
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
    }
    for program in BUILT:
        _run(["nice", "-n", "5", "make", f"WHAT=cmd/{program}"], cwd=sources, env=environment)
    return sources / "_output" / "bin"


def _install(made: Path) -> None:
    for folder in (PROGRAMS, CNI_PLUGINS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    packaged = WORK / "packages" / "usr"
    for program in BUILT:
        shutil.copy(made / program, PROGRAMS)
    for program in PACKAGED:
        shutil.copy(packaged / "bin" / program, PROGRAMS)
    for plugin in PLUGINS:
        shutil.copy(packaged / "lib" / "cni" / plugin, CNI_PLUGINS)


def _apt(*arguments: str) -> None:
    """apt-get with lists of its own, so that this machine's stay as they are."""
    settings = {
        "Dir::Etc::sourcelist": WORK / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": WORK / "lists",
        "Dir::Cache": WORK,
        "APT::Sandbox::User": "root",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", "-qq", *options, *arguments], cwd=WORK)


def _run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """The standard output of a command, which is added to the log with its errors."""
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-1000:]}; see {LOG}")
    return done.stdout
