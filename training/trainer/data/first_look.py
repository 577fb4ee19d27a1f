"""The first look at a corpus before preparation: is there enough of it, and is it text.

Nothing is read beyond what answers that: the first tokens, and the beginnings of some files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.corpus import (
    BLOCK_CHARS,
    CorpusError,
    SourceFile,
    find_sources,
    iterate_documents,
)
from perdure.training.trainer.data.tokenizer import Tokenizer

NUM_FILES = 64  # of a corpus, evenly chosen
HEAD_CHARS = 64 * 1024
# Pages that crawlers collect have a few such characters; a file with more of them is in another
# encoding, or no text at all.
MAX_STRANGE_SHARE = 0.01
# U+FFFD stands for bytes that are not UTF-8; of the others no text has any.
_STRANGE = "\ufffd\x7f" + "".join(map(chr, {*range(32)} - {*b"\t\n\x0b\x0c\r\x1b"}))


class TooFewTokens(CorpusError):  # noqa: N818 a state of affairs, named as it is shown
    """All of the corpus has fewer tokens than are needed."""


def num_strange(text: str) -> int:
    """Count the characters that no text has."""
    return sum(map(text.count, _STRANGE))


def strange_text(num_strange: int, num_chars: int) -> str | None:
    """Describe the fault of a file with so many strange characters; None: it has none."""
    if num_strange <= num_chars * MAX_STRANGE_SHARE:
        return None
    share = num_strange / num_chars
    return f"{share:.0%} of its characters are not UTF-8 text; they are trained on as they are"


def strange_files(spec: DataSpec) -> Iterator[str]:
    """Yield a line for each file that does not begin as text, of at most `NUM_FILES`.

    Raises:
        CorpusError: the sources cannot be used.
    """
    sources = find_sources(spec)
    for source in sources[:: -(-len(sources) // NUM_FILES)]:
        head = _head(source, spec)
        problem = strange_text(num_strange(head), len(head))
        if problem is not None:
            yield f"data.sources: {source.path}: {problem}"


def _head(source: SourceFile, spec: DataSpec) -> str:
    head = ""
    for text in _documents(source, spec, HEAD_CHARS):
        head += text
        if len(head) >= HEAD_CHARS:
            break
    return head


def check_enough(
    spec: DataSpec, tokenizer: Tokenizer, sources: Sequence[SourceFile], *, num_tokens: int
) -> None:
    """Read tokens until there are enough.

    Raises:
        TooFewTokens: all of the corpus has fewer.
        CorpusError: a file is damaged.
    """
    block_chars = min(BLOCK_CHARS, spec.shard_size_bytes)  # each block is a document
    num_found = 0
    for source in sources:
        for text in _documents(source, spec, block_chars):
            (ids,) = tokenizer.encode_batch([text])
            num_found += ids.size + 1  # its end
            if num_found >= num_tokens:
                return
    raise TooFewTokens(f"needs at least {num_tokens:,} tokens, the corpus has {num_found:,}")


def _documents(source: SourceFile, spec: DataSpec, block_chars: int) -> Iterator[str]:
    return iterate_documents(source.path, text_field=spec.text_field, block_chars=block_chars)
