"""Which values of a job's `env` are secrets that do not belong into a job.

Pure, and careful: a variable of the libraries, a path, a number or a list of words is none. A value
that has the form of a known key is one whatever its name is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import pairwise

from perdure.training.masking import has_key, is_secret_name

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
    r"|true|false|yes|no|on|off|none|null|auto|default|disabled|enabled"  # the first one is empty
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
# Of random letters and digits more than half differ in kind from the one before; of words in
# CamelCase about a quarter.
MIN_CHANGES = 0.4


def why_secret(name: str, value: str) -> str | None:
    """Why a variable's literal value must be a secret; None: it need not be one."""
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
    changes = sum(one != other for one, other in pairwise(kinds)) / (len(word) - 1)
    return changes >= MIN_CHANGES and entropy_bits(word) >= MIN_ENTROPY_BITS


def entropy_bits(word: str) -> float:
    """Shannon's entropy of the characters of a word, in bits for each."""
    shares = [count / len(word) for count in Counter(word).values()]
    return -sum(share * math.log2(share) for share in shares)


def _kind(character: str) -> str:
    if character.isdigit():
        return "0"
    if character.isalpha():
        return "A" if character.isupper() else "a"
    return "+"
