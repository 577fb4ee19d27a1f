"""Tokenizers: from text to token ids.

Ids are in [0, vocab_size); no tokenizer adds special tokens by itself, the end of a document is
the caller's `eos_id`. Two tokenizers of one fingerprint give the same ids for the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from perdure.storage.regular_file import read_regular
from perdure.training.config.model import TokenizerSpec
from perdure.training.trainer.data.manifest import hash_bytes

NUM_BYTES = 256
EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|eos|>", "<|im_end|>")


class Tokenizer(Protocol):
    """A tokenizer, as the preparation uses it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of document included."""
        ...

    @property
    def eos_id(self) -> int:
        """Id that ends every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids of some text would."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Encode each text, ids [T], without an end of document."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the UTF-8 bytes, 256 ends a document."""

    vocab_size = NUM_BYTES + 1
    eos_id = NUM_BYTES
    fingerprint = "byte-1"

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """See `Tokenizer.encode_batch`."""
        data = (text.encode("utf-8", "replace") for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in data]


class FileTokenizer:
    """A `tokenizers` JSON file.

    Args:
        path: the file; truncation and padding it asks for are switched off.

    Raises:
        ValueError: no such file, not a tokenizer, or none of `EOS_NAMES` is in its vocabulary.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = read_regular(path)
        except OSError as exc:
            raise ValueError(f"tokenizer.path={path}: cannot be read: {exc.strerror}") from exc
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as exc:  # tokenizers raises bare Exception
            raise ValueError(f"tokenizer.path={path}: not a tokenizers JSON file: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        eos_id = next((vocabulary[name] for name in EOS_NAMES if name in vocabulary), None)
        if eos_id is None:
            raise ValueError(
                f"tokenizer.path={path}: no end-of-document token; "
                f"looked for {', '.join(EOS_NAMES)}"
            )
        self.eos_id = eos_id
        # Not the number of entries: the ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = f"file-1-{hash_bytes(content)}"

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """See `Tokenizer.encode_batch`; uses all cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Open the tokenizer that `spec` names.

    Raises:
        ValueError: as `FileTokenizer`.
    """
    if spec.kind == "byte":
        return ByteTokenizer()
    assert spec.path is not None  # noqa: S101 kind=file has a path
    return FileTokenizer(Path(spec.path).expanduser())
