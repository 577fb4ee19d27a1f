from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from training.errors import InputError
from training.trainer.data.spec import TokenizerSpec
from training.trainer.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer

VOCABULARY = {"[UNK]": 0, "hello": 1, "world": 2, "</s>": 5}


def save(path: Path, vocabulary: dict[str, int]) -> Path:
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "</s>" in vocabulary:
        made.add_special_tokens(["</s>"])
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
        )
    made.enable_truncation(2)
    made.save(str(path))
    return path


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back_as_they_went_in(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text


def test_the_byte_vocabulary_is_all_bytes_and_an_end():
    tokenizer = open_tokenizer(TokenizerSpec())
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_a_file_encodes_whole_documents_without_special_tokens(tmp_path):
    path = save(tmp_path / "t.json", VOCABULARY)
    tokenizer = open_tokenizer(TokenizerSpec(kind="file", path=str(path)))
    assert tokenizer.encode("hello world hello").tolist() == [1, 2, 1]
    assert tokenizer.decode([1, 2, 5]) == "hello world"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (6, 5)
    assert tokenizer.encode("").dtype == np.uint32


def test_a_document_that_spells_the_end_token_does_not_end_there(tmp_path):
    tokenizer = FileTokenizer(save(tmp_path / "t.json", {"a": 0, "</s>": 1, "[UNK]": 2}))
    tokenizer_ids = tokenizer.encode("a x</s>a a")
    assert tokenizer_ids.tolist() == [0, 2, 0]


def test_the_fingerprint_follows_the_content_not_the_path(tmp_path):
    first = FileTokenizer(save(tmp_path / "a.json", VOCABULARY))
    copy = FileTokenizer(save(tmp_path / "b.json", VOCABULARY))
    other = FileTokenizer(save(tmp_path / "c.json", {**VOCABULARY, "more": 3}))
    assert first.fingerprint == copy.fingerprint != other.fingerprint


def test_a_vocabulary_without_an_end_token_is_refused_with_the_names_looked_for(tmp_path):
    path = save(tmp_path / "t.json", {"[UNK]": 0, "a": 1})
    with pytest.raises(InputError, match=r"looked for <\|endoftext\|>.*</s>.*\[SEP\]"):
        FileTokenizer(path)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.json: cannot be read: No such file"):
        FileTokenizer(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad\.json: is not a tokenizers JSON file"):
        FileTokenizer(tmp_path / "bad.json")
