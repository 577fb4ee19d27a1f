"""Environment variables of the workers whose values are kept elsewhere; the job has references.

A value is read when an attempt starts, so one that is renewed reaches the next attempt. It goes
into the environment of the workers, and into no job, ledger, parameter, order on a disk or log.

A value of the job's `env` that must be a secret is refused. The search is careful: a variable of
the libraries, a path, a number or a list of words is no secret. A value in the form of a known key
is a secret under any name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from perdure.storage.frozen_model import SettingsModel
from perdure.training.masking import MAX_MATCH_BYTES, MIN_SECRET_BYTES, has_key, is_secret_name

MAX_FILE_BYTES = 64 << 10
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretSource(SettingsModel):
    """The place of one variable's value: exactly one of block, file and secret."""

    block: str | None = Field(
        None,
        description="Prefect block: the name of a Secret block, or type/name of any other block; "
        "the flow's process reads it and hands the value to the nodes",
    )
    field: str | None = Field(
        None,
        description="field of the block that holds the value, with dots for nested fields; a "
        "Secret block with a single text needs none",
    )
    file: str | None = Field(
        None,
        description="absolute path of a file on the nodes, such as a mounted Kubernetes Secret; a "
        "newline at its end is dropped",
    )
    secret: str | None = Field(
        None,
        description="environment variable of the node agent's container, as the platform sets it "
        "from a secret; local engine: of the supervisor's environment",
    )

    @model_validator(mode="after")
    def _is_one_reference(self) -> Self:
        references = [self.block, self.file, self.secret]
        if len([reference for reference in references if reference]) != 1:
            raise ValueError("needs exactly one of block, file and secret")
        if any(reference and has_key(reference) for reference in references):
            raise ValueError("holds a secret itself; it names where the secret is kept")
        if self.field is not None and self.block is None:
            raise ValueError("field is of a block, and there is none")
        if self.file is not None and not self.file.startswith("/"):
            raise ValueError("file must be an absolute path on the nodes")
        if self.secret is not None and not _VARIABLE.fullmatch(self.secret):
            raise ValueError("secret must be the name of an environment variable of the container")
        return self

    @property
    def text(self) -> str:
        """The reference for people."""
        if self.block is not None:
            return f"Prefect block {self.block}" + (f", field {self.field}" if self.field else "")
        return f"file {self.file}" if self.file is not None else f"variable {self.secret}"


def values_on_node(
    sources: Mapping[str, SecretSource],
    *,
    delivered: Mapping[str, str],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Read the values of the variables on a node.

    Args:
        sources: by name of the variable.
        delivered: values of the blocks, by name of the variable.
        environment: the node agent's environment.

    Raises:
        ValueError: a value is not there, or cannot be used; names the variable, never the value.
    """
    return {
        name: checked_value(name, _read(name, source, delivered, environment))
        for name, source in sources.items()
    }


def checked_value(name: str, value: str) -> str:
    """Check a value, and return it.

    Raises:
        ValueError: no process can have it as a variable, or no log could be kept free of it.
    """
    sizes = [len(line.encode(errors="surrogateescape")) for line in value.splitlines()]
    longest = max(sizes, default=0)
    if not MIN_SECRET_BYTES <= longest <= MAX_MATCH_BYTES:
        limits = f"{MIN_SECRET_BYTES} to {MAX_MATCH_BYTES}"
        raise ValueError(f"env_from.{name}: {longest} bytes, {limits} can be kept out of logs")
    if "\0" in value:
        raise ValueError(f"env_from.{name}: holds a zero byte, no variable can")
    return value


def _read(
    name: str,
    source: SecretSource,
    delivered: Mapping[str, str],
    environment: Mapping[str, str],
) -> str:
    if source.file is not None:
        try:
            with Path(source.file).open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"env_from.{name}: {source.file}: {error.strerror}") from None
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"env_from.{name}: {source.file}: more than {MAX_FILE_BYTES} bytes")
        return raw.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")
    if source.secret is not None:
        if source.secret not in environment:
            raise ValueError(f"env_from.{name}: the container has no variable {source.secret}")
        return environment[source.secret]
    if name not in delivered:
        raise ValueError(f"env_from.{name}: the value of {source.text} did not come with the order")
    return delivered[name]


# Settings of libraries and platforms, whose names say KEY or TOKEN of something else.
SETTINGS = (
    "ACL_", "ASCEND_", "ATB_", "CUDA_", "FI_", "GLOO_", "HCCL_", "LCCL_", "LD_", "MA_", "MS_",
    "NCCL_", "NVTE_", "OMP_", "PYTHON", "PYTORCH_", "TASK_QUEUE_", "TE_", "TORCH", "TRITON_",
    "UCX_", "VC_", "XLA_",
)  # fmt: skip
# Tokens of text, and keys that open nothing; names of files that hold a secret.
_ORDINARY_NAMES = re.compile(
    r"(?:^|_)(?:MAX|MIN|NUM|TOTAL|PAD|EOS|BOS|UNK|MASK|SEP|CLS|SPECIAL|STOP|IMAGE|SORT|PRIMARY"
    r"|PUBLIC|CACHE|GROUP|PARTITION|NEW)_?(?:TOKENS?|KEYS?)(?:_|$)"
    r"|(?:^|_)(?:TOKENS?|KEYS?)_(?:PER|IN|COUNT|LIMIT|BUDGET|LENGTH|SIZE|TYPE|NAME)(?:_|$)"
    r"|_(?:FILE|PATH|DIR|FOLDER)$",
    re.IGNORECASE,
)
_PASSWORDS = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET", re.IGNORECASE)
_ORDINARY_VALUES = re.compile(
    r"|true|false|yes|no|on|off|none|null|auto|default|disabled|enabled"  # the first word is empty
    r"|-?\d{1,3}"
    r"|(?:/|\./|\.\./|~/|\$)[^\s+=]*"  # a path, or the value of another variable
    r"|<[^<>]*>|\[[^\[\]]*\]"  # tokens of text
    r"|[a-z][a-z0-9+.-]*://[^\s@]*",  # an address without a password
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_WORDS = re.compile(r"[\s,;:=|/._-]+")
MIN_RANDOM_LENGTH = 20
MIN_ENTROPY_BITS = 3.5  # of a character
# Among random letters and digits more than half differ in kind from the previous; in words of
# CamelCase about a quarter.
MIN_CHANGES = 0.4


def why_secret(name: str, value: str) -> str | None:
    """Explain why a variable's literal value must be a secret; None: it need not be a secret."""
    if has_key(value):
        return "its value has the form of a key"
    if name.startswith(SETTINGS) or _ORDINARY_VALUES.fullmatch(value):
        return None
    if is_secret_name(name) and not _ORDINARY_NAMES.search(name):
        is_count = _NUMBER.fullmatch(value) is not None and not _PASSWORDS.search(name)
        return None if is_count else "its name marks a secret"
    if any(is_random(word) for word in _WORDS.split(value)):
        return "its value looks random"
    return None


def is_random(word: str) -> bool:
    """Whether a word is long, and mixes capitals, small letters and digits as no name does."""
    kinds = [_kind(character) for character in word]
    if len(word) < MIN_RANDOM_LENGTH or not {"A", "a", "0"} <= set(kinds):
        return False
    changes = sum(kind != other for kind, other in pairwise(kinds)) / (len(word) - 1)
    return changes >= MIN_CHANGES and entropy_bits(word) >= MIN_ENTROPY_BITS


def entropy_bits(word: str) -> float:
    """Compute Shannon's entropy of a word, in bits for each character."""
    shares = [count / len(word) for count in Counter(word).values()]
    return -sum(share * math.log2(share) for share in shares)


def _kind(character: str) -> str:
    if character.isdigit():
        return "0"
    if character.isalpha():
        return "A" if character.isupper() else "a"
    return "+"
