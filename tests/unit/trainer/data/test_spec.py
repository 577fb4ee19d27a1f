from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from perdure.training.config.model import DataSpec, TokenizerSpec


def test_a_corpus_needs_at_least_one_source() -> None:
    with pytest.raises(ValidationError, match="sources"):
        DataSpec(sources=())


def test_shards_smaller_than_four_kib_are_refused() -> None:
    with pytest.raises(ValidationError, match="shard_size_bytes"):
        DataSpec(sources=("a.txt",), shard_size_bytes=4095)


@pytest.mark.parametrize("values", [{"kind": "file"}, {"kind": "byte", "path": "t.json"}])
def test_a_tokenizer_path_goes_with_kind_file_and_only_with_it(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="kind=file needs path"):
        TokenizerSpec.model_validate(values)


@pytest.mark.parametrize("model", [DataSpec, TokenizerSpec])
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(ValidationError, match="extra"):
        DataSpec.model_validate({"sources": ["a.txt"], "shards": 3})
