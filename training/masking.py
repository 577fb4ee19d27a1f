"""Masks over secrets in logs, before the logs leave the node.

Known secrets are masked everywhere: values of credentials, tokens, and of environment variables
whose names mark them as secret. Unknown secrets are masked by their form. Pure and streaming:
bytes come in pieces of any size, a piece may end in the middle of a secret. Sizes are bytes.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote

MASK = b"***"
# A shorter value would be masked everywhere, and would give itself away by that.
MIN_SECRET_BYTES = 6
# No match is longer, so a match that ends beyond the bytes read can be awaited.
MAX_MATCH_BYTES = 8 << 10
WINDOW_BYTES = 64 << 10
_VALUE = rb"""[^\s"'<>&,;]{1,4096}"""
# Words that end a name of something secret. `token` alone is a unit of text in these logs.
_NAMES = (
    rb"password|passwd|passphrase|secret|credentials?|signature|api[_-]?key|access[_-]?key"
    rb"|secret[_-]?key|private[_-]?key|access[_-]?key[_-]?id"
    rb"|(?:access|api|auth|bearer|hf|id|private|refresh|security|session)[_-]?token"
)
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:KEYS?|TOKENS?|SECRETS?|PASS|CREDENTIALS?)(?:_|$)"
    r"|(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(?:_|$)",
    re.IGNORECASE,
)
# Names of further secret variables, with commas between them: an agent sets it for its workers.
SECRETS_ENV = "PERDURE_SECRETS"
# Keys of well-known forms.
_KEYS = (
    rb"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{12,128}",
    rb"\bhf_[A-Za-z0-9]{20,200}",
    rb"\bgh[pousr]_[A-Za-z0-9]{30,300}",
    rb"\bgithub_pat_[A-Za-z0-9_]{30,300}",
    rb"\bglpat-[A-Za-z0-9_-]{20,300}",
    rb"\bxox[abeprs]-[A-Za-z0-9-]{10,300}",
    rb"\bsk-[A-Za-z0-9_-]{20,300}",
    rb"\bAIza[A-Za-z0-9_-]{35}",
    rb"\beyJ[A-Za-z0-9_-]{10,2048}\.[A-Za-z0-9_-]{10,4096}\.[A-Za-z0-9_-]{10,1024}",
)
_IN_ADDRESS = (
    rb"(?P<keep5>[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@\"']{0,256}:)[^@\s/\"']{1,1024}(?=@)"
)
# Every form keeps its group `keep` and loses the rest, but for the group `after`.
_FORMS = (
    # Headers, as sent and as dictionaries of them are printed.
    rb"""(?P<keep1>(?i:authorization)b?["']?\s{0,4}[:=]\s{0,4}b?["']?)[^\r\n"']{1,4096}""",
    rb"(?P<keep2>(?i:\bbearer)\s{1,4})[A-Za-z0-9._~+/-]{8,4096}={0,2}",
    # name=value, "name": "value", and the parameters of presigned addresses.
    rb"""(?P<keep3>(?i:""" + _NAMES + rb""")b?["']?\s{0,4}[=:]\s{0,4}b?["']?)(?!\*\*\*)""" + _VALUE,
    rb"(?P<keep4>(?i:\btoken)[\"']?\s{0,4}[=:]\s{0,4}[\"']?)[A-Za-z0-9._~+/-]{16,4096}={0,2}",
    _IN_ADDRESS,
    *_KEYS,
)
# A line without any of these has none of the forms; looking for them is fifty times as fast.
# In lower case, but for the prefixes of keys.
_HINTS = (
    b"authorization", b"bearer", b"passw", b"passphrase", b"secret", b"credential", b"signature",
    *(a + b + b"key" for a in (b"api", b"access", b"private") for b in (b"", b"_", b"-")),
    *(b"token" + end for end in (b"'", b'"', b":", b"=", b" ", b"\t")),
    b"@", b"hf_", *(b"gh" + kind + b"_" for kind in (b"p", b"o", b"u", b"r", b"s")),
    b"sk-", b"eyj", b"akia", b"asia", b"github_pat_", b"glpat-", b"xox", b"aiza",
)  # fmt: skip
_ANY_KEY = re.compile(b"|".join((_IN_ADDRESS, *_KEYS, rb"PRIVATE KEY-----")))
_PEM_MARK = b"PRIVATE KEY-----"
_PEM_BEGIN = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----")
_PEM_BODY = string.ascii_letters.encode() + b"0123456789+/=\r\n"
_PEM_END = re.compile(rb"-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----")


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """Collect the values of variables that their names, or `SECRETS_ENV`, mark as secret."""
    marked = environment.get(SECRETS_ENV, "").split(",")
    return frozenset(
        value for name, value in environment.items() if name in marked or is_secret_name(name)
    )


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: MY_API_KEY does, TOKENIZERS does not."""
    return _SECRET_NAME.search(name) is not None


def has_key(text: str) -> bool:
    """Whether a text has a key of a well-known form, or an address with a password."""
    return _ANY_KEY.search(text.encode(errors="surrogateescape")) is not None


def mask_stream(pieces: Iterable[bytes], secrets: Collection[str]) -> Iterator[bytes]:
    """Replace every secret in a stream of bytes by `MASK`.

    Args:
        pieces: parts of a text, in their order.
        secrets: known values; a value of several lines is masked line by line.
    """
    literals = literal_forms(secrets)
    lines = _Lines(literals, _pattern(literals))
    for piece in pieces:
        yield from lines.feed(piece)
    yield from lines.end()


def mask_text(text: str, secrets: Collection[str]) -> str:
    """Replace every secret in a short text by `MASK`."""
    return make_mask(secrets)(text)


def make_mask(secrets: Collection[str]) -> Callable[[str], str]:
    """Make a function that masks short texts; it prepares its secrets only at this call."""
    literals = literal_forms(secrets)
    pattern = _pattern(literals)

    def mask(text: str) -> str:
        lines = _Lines(literals, pattern)
        pieces = (*lines.feed(text.encode(errors="surrogateescape")), *lines.end())
        return b"".join(pieces).decode(errors="surrogateescape")

    return mask


class _Lines:
    """A mask over lines; it returns the part of an unfinished line that is safe."""

    def __init__(self, literals: Sequence[bytes], pattern: re.Pattern[bytes]) -> None:
        self._literals = literals
        self._pattern = pattern
        self._pending = b""
        self._in_key = False  # between the lines of a private key

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the masked bytes that are safe after a further piece."""
        self._pending += piece
        end = max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1
        if end:
            whole, self._pending = self._pending[:end], self._pending[end:]
            yield self._mask(whole)
        if len(self._pending) > WINDOW_BYTES:
            cut = self._safe_cut()
            ready, self._pending = self._pending[:cut], self._pending[cut:]
            yield self._mask(ready)

    def end(self) -> Iterator[bytes]:
        """Yield the remaining bytes."""
        if self._pending:
            yield self._mask(self._pending)

    def _safe_cut(self) -> int:
        """Return where the pending bytes may be cut without cutting a secret."""
        cut = len(self._pending) - MAX_MATCH_BYTES
        if self._may_hold(self._pending):
            for match in self._pattern.finditer(self._pending):
                if match.start() < cut < match.end():
                    return match.start()
        return cut

    def _may_hold(self, text: bytes) -> bool:
        """Whether a text may hold a secret."""
        lower = text.lower()
        return any(hint in lower for hint in _HINTS) or any(
            literal in text for literal in self._literals
        )

    def _mask(self, text: bytes) -> bytes:
        if self._in_key or _PEM_MARK in text:
            text = b"".join(self._without_keys(text))
        if not self._may_hold(text):
            return text
        return b"".join(
            self._pattern.sub(_mask_match, line) if self._may_hold(line) else line
            for line in text.splitlines(keepends=True)
        )

    def _without_keys(self, text: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(text):
            if not self._in_key:
                begin = _PEM_BEGIN.search(text, at)
                end = _PEM_END.search(text, at, begin.start() if begin else len(text))
                if end is not None:  # the text begins within a key
                    yield text[at : end.start()].rstrip(_PEM_BODY) + MASK
                    at = end.start()
                if begin is None:
                    yield text[at:]
                    return
                yield text[at : begin.end()]
                yield MASK
                at, self._in_key = begin.end(), True
            end = _PEM_END.search(text, at)
            if end is None:
                return
            at, self._in_key = end.start(), False
            yield text[at : end.end()]
            at = end.end()


def _mask_match(match: re.Match[bytes]) -> bytes:
    content = next((text for text in match.groupdict().values() if text is not None), b"")
    return content + MASK


def literal_forms(secrets: Collection[str]) -> list[bytes]:
    """List the forms of known values in a text, longest first: one may begin with another."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    # As it is, in an address, and as JSON and Python print it.
    forms = {
        form
        for line in lines
        for form in (line, quote(line, safe=""), json.dumps(line)[1:-1], repr(line)[1:-1])
    }
    literals = {form.encode(errors="surrogateescape") for form in forms}
    fit = (form for form in literals if MIN_SECRET_BYTES <= len(form) <= MAX_MATCH_BYTES)
    return sorted(fit, key=lambda form: (-len(form), form))


def _pattern(literals: Iterable[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join((*map(re.escape, literals), *_FORMS)))
