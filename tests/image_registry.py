"""A real registry of images: Debian's docker-registry, open, with passwords, or with tokens.

`make .venv/.image-registry` unpacks it. Tokens come from a server of the test's own, as the
Distribution project describes them (https://distribution.github.io/distribution/spec/auth/jwt/).
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from perdure.training.processes import free_port
from tests.waiting import wait_for

HOST = "127.0.0.1"
_UNPACKED = Path(sys.prefix) / "docker-registry" / "usr" / "bin" / "docker-registry"
PROGRAM = shutil.which("docker-registry") or (str(_UNPACKED) if _UNPACKED.exists() else None)
MISSING = "needs docker-registry: make .venv/.image-registry"
USER, PASSWORD = "robot", "correct-horse"
# bcrypt of PASSWORD, the only form that the registry takes.
_HTPASSWD = f"{USER}:$2b$04$TLUvksMBLdaI/6/4gniFV.IdGfihky69TmV1LIolKzR/r2VTBM.ry\n"
_ISSUER = "tests"
_SERVICE = "images"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Access(StrEnum):
    """Who may pull."""

    ALL = "all"
    PASSWORD = "password"
    TOKEN = "token"


class ImageRegistry:
    """A registry on loopback, in a folder of its own.

    Attributes:
        address: HOST:PORT, with which names of its images begin.
    """

    def __init__(self, folder: Path, access: Access = Access.ALL) -> None:
        assert PROGRAM is not None, MISSING
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"{HOST}:{free_port(HOST)}"
        self._access, self._folder = access, folder
        self._tokens = TokenServer(folder) if access is Access.TOKEN else None
        config = folder / "registry.yml"
        config.write_text(yaml.safe_dump(self._configuration()))
        with (folder / "registry.log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "serve", str(config)], stdout=log, stderr=log
            )
        wait_for(self._answers, what=f"the registry answers; see {folder}")

    def _configuration(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": str(self._folder / "images")}},
            "http": {"addr": self.address},
        }
        if self._access is Access.PASSWORD:
            passwords = self._folder / "htpasswd"
            passwords.write_text(_HTPASSWD)
            document["auth"] = {"htpasswd": {"realm": "images", "path": str(passwords)}}
        if self._tokens is not None:
            document["auth"] = {
                "token": {
                    "realm": self._tokens.url, "service": _SERVICE, "issuer": _ISSUER,
                    "rootcertbundle": str(self._tokens.certificate),
                }
            }  # fmt: skip
        return document

    def _answers(self) -> bool:
        assert self._process.poll() is None
        try:
            return httpx.get(f"http://{self.address}/v2/").status_code in (200, 401)
        except httpx.TransportError:
            return False

    def push(self, repository: str, tag: str) -> str:
        """Put a tiny image there. Returns its name."""
        auth: httpx.Auth | None = None
        headers: dict[str, str] = {}
        if self._access is Access.PASSWORD:
            auth = httpx.BasicAuth(USER, PASSWORD)
        if self._tokens is not None:
            headers["Authorization"] = f"Bearer {self._tokens.token(repository, 'pull', 'push')}"
        base = f"http://{self.address}/v2/{repository}"
        with httpx.Client(auth=auth, headers=headers) as client:
            described = [self._blob(client, base, one) for one in (b"{}", b"layer")]
            config, layer = described
            manifest = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **config},
                "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", **layer}],
            }
            put = client.put(
                f"{base}/manifests/{tag}",
                content=json.dumps(manifest),
                headers={"Content-Type": _MANIFEST},
            )
            put.raise_for_status()
        return f"{self.address}/{repository}:{tag}"

    def _blob(self, client: httpx.Client, base: str, content: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        begun = client.post(f"{base}/blobs/uploads/")
        begun.raise_for_status()
        place = httpx.URL(base).join(begun.headers["location"])
        done = client.put(place.copy_merge_params({"digest": digest}), content=content)
        done.raise_for_status()
        return {"digest": digest, "size": len(content)}

    def end(self) -> None:
        """End it, and its server of tokens."""
        self._process.terminate()
        self._process.wait(240)
        if self._tokens is not None:
            self._tokens.end()


class TokenServer:
    """Gives its user tokens for pulls, signed as its registry wants them."""

    def __init__(self, folder: Path) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._made = self._self_signed()
        self.certificate = folder / "tokens.crt"
        self.certificate.write_bytes(self._made.public_bytes(serialization.Encoding.PEM))
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

        self._server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._server.server_address[1]}/token"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _self_signed(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _ISSUER)])
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
        builder = builder.public_key(self._key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(hours=1))
        builder = builder.not_valid_after(now + dt.timedelta(hours=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        return builder.sign(self._key, hashes.SHA256())

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Answer a client that asks for a token."""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(request.path).query)
        wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        is_user = request.headers.get("Authorization") == wanted
        _, repository, actions = query["scope"][0].split(":")
        is_user = is_user and query["service"] == [_SERVICE] and actions == "pull"
        body = json.dumps({"token": self.token(repository, "pull")}) if is_user else "{}"
        request.send_response(200 if is_user else 401)
        request.end_headers()
        request.wfile.write(body.encode())

    def token(self, repository: str, *actions: str) -> str:
        """A token for what is done with a repository."""
        der = self._made.public_bytes(serialization.Encoding.DER)
        header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode()]}
        now_s = int(time.time())
        claims = {
            "iss": _ISSUER, "sub": USER, "aud": _SERVICE, "jti": str(now_s),
            "exp": now_s + 300, "nbf": now_s - 60, "iat": now_s,
            "access": [{"type": "repository", "name": repository, "actions": list(actions)}],
        }  # fmt: skip
        signed = f"{_word(json.dumps(header).encode())}.{_word(json.dumps(claims).encode())}"
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_word(signature)}"

    def end(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


def _word(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
