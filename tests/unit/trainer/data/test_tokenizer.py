from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from perdure.training.config.model import TokenizerSpec
from perdure.training.trainer.data.tokenizer import ByteTokenizer, open_tokenizer


def save(path: Path, vocabulary: dict[str, int]) -> TokenizerSpec:
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(2)
    made.save(str(path))
    return TokenizerSpec(kind="file", path=str(path))


@given(st.text())
def test_ids_of_the_byte_tokenizer_are_the_bytes_of_the_text(text: str) -> None:
    (ids,) = ByteTokenizer().encode_batch([text])
    assert ids.tolist() == list(text.encode("utf-8", "replace"))


def test_a_file_is_used_with_its_end_and_without_its_truncation(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(save(tmp_path / "t.json", {"[UNK]": 0, "a": 1, "b": 2, "</s>": 9}))
    ids = tokenizer.encode_batch(["a b a c", "b"])
    assert [one.tolist() for one in ids] == [[1, 2, 1, 0], [2]]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (9, 10)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first = open_tokenizer(save(tmp_path / "1.json", {"[UNK]": 0, "</s>": 1}))
    same = open_tokenizer(save(tmp_path / "2.json", {"[UNK]": 0, "</s>": 1}))
    other = open_tokenizer(save(tmp_path / "3.json", {"[UNK]": 0, "</s>": 1, "a": 2}))
    assert first.fingerprint == same.fingerprint
    assert len({first.fingerprint, other.fingerprint, ByteTokenizer().fingerprint}) == 3


def test_the_error_of_a_file_without_an_end_lists_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"looked for <\|endoftext\|>, </s>"):
        open_tokenizer(save(tmp_path / "t.json", {"[UNK]": 0}))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match=r"t\.json: cannot be read"):
        open_tokenizer(TokenizerSpec(kind="file", path=str(path)))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json: not a tokenizers JSON file"):
        open_tokenizer(TokenizerSpec(kind="file", path=str(path)))
