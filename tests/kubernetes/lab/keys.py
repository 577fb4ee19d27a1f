"""The lab's certificates, tokens and kubeconfig files, new for each life of it."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.kubernetes.lab.places import (
    API_SERVICE_IP,
    API_URL,
    HUB_IP,
    KEYS,
    KUBECONFIG,
    NODES,
    kubeconfig_of,
)

VALID = dt.timedelta(days=30)
ADMINS = "system:masters"
# User of Kubernetes and its group, by the name of the kubeconfig file.
USERS = {
    "admin": ("admin", ADMINS),
    "controller-manager": ("system:kube-controller-manager", ADMINS),
    "scheduler": ("system:kube-scheduler", ADMINS),
    "proxy": ("system:kube-proxy", "system:node-proxier"),
    **{node.name: (f"system:node:{node.name}", "system:nodes") for node in NODES},
}
API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
API_ADDRESSES = ("127.0.0.1", HUB_IP, API_SERVICE_IP)


def make_keys() -> None:
    """Write everything into the folder of keys, and the kubeconfig of an administrator."""
    KEYS.mkdir(parents=True, mode=0o700)
    authority = ec.generate_private_key(ec.SECP256R1())
    name = _name("lab")
    root = (
        _certificate(name, name, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority, hashes.SHA256())
    )
    _write("ca", root, authority)
    _issue("apiserver", "kube-apiserver", name, authority, served=True)
    _issue("kubelet-client", "apiserver", name, authority, group=ADMINS)
    _write("service-accounts", None, ec.generate_private_key(ec.SECP256R1()))
    tokens = {user: secrets.token_hex(16) for user in USERS}
    lines = [f'{tokens[user]},{name},{name},"{group}"' for user, (name, group) in USERS.items()]
    (KEYS / "tokens.csv").write_text("\n".join(lines) + "\n")
    for user, token in tokens.items():
        _write_kubeconfig(KUBECONFIG if user == "admin" else kubeconfig_of(user), token, root)


def _issue(
    file: str,
    common_name: str,
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
    *,
    group: str = "",
    served: bool = False,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _certificate(_name(common_name, group), issuer, key)
    if served:
        addresses = [x509.IPAddress(ipaddress.ip_address(one)) for one in API_ADDRESSES]
        names = [x509.DNSName(one) for one in API_NAMES]
        builder = builder.add_extension(
            x509.SubjectAlternativeName([*addresses, *names]), critical=False
        )
    _write(file, builder.sign(authority, hashes.SHA256()), key)


def _name(common_name: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _write(
    file: str, certificate: x509.Certificate | None, key: ec.EllipticCurvePrivateKey
) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (KEYS / f"{file}.key").write_bytes(private)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (KEYS / f"{file}.pub").write_bytes(public)
    if certificate is not None:
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        (KEYS / f"{file}.crt").write_bytes(pem)


def _write_kubeconfig(path: Path, token: str, root: x509.Certificate) -> None:
    authority = KEYS / "ca.crt"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "lab", "cluster": {"server": API_URL, "certificate-authority": str(authority)}}
        ],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "user"}}],
        "current-context": "lab",
    }
    path.write_text(json.dumps(document, indent=1))
    path.chmod(0o600)
