"""The container: what is laid out can be parsed, and nothing else can."""

from __future__ import annotations

import json

import pytest

from perdure.storage.errors import Corrupt
from perdure.storage.safetensors_file import LENGTH, header_size_bytes, parse_header, plan_layout

TENSORS = [("b", "BF16", (3,)), ("a", "U8", (5,)), ("c", "F64", (2, 2)), ("d", "F32", ())]


def test_a_layout_is_parsed_back_without_gaps_and_aligned():
    layout = plan_layout(TENSORS)
    assert header_size_bytes(layout.header[:8], url="u") == len(layout.header)
    parsed = parse_header(layout.header, size_bytes=layout.size_bytes, url="u")
    assert parsed == layout.entries
    ends = [len(layout.header)]
    for entry in sorted(parsed.values(), key=lambda entry: entry.begin):
        assert entry.begin == ends[-1]
        ends.append(entry.end)
    assert ends[-1] == layout.size_bytes
    assert parsed["c"].begin % 8 == 0
    assert parsed["d"].begin % 4 == 0
    assert parsed["b"].begin % 2 == 0


def test_metadata_stands_in_the_header_and_is_no_tensor():
    layout = plan_layout(TENSORS, metadata={"format": "pt"})
    assert json.loads(layout.header[8:])["__metadata__"] == {"format": "pt"}
    parsed = parse_header(layout.header, size_bytes=layout.size_bytes, url="u")
    assert parsed == layout.entries


def test_one_name_for_two_tensors_is_refused():
    with pytest.raises(ValueError, match="two tensors are called 'a'"):
        plan_layout([("a", "U8", (1,)), ("a", "F32", (1,))])


@pytest.mark.parametrize("prefix", [b"", b"1234567", b"\x80\x04\x95abcdefg"[:8], b"PK\x03\x04abcd"])
def test_what_begins_otherwise_is_no_container(prefix):
    with pytest.raises(Corrupt, match="safetensors file"):
        header_size_bytes(prefix, url="u")


def entry(**changes: object) -> str:
    return json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"a": 3}',
        "[" * 100_000,
        entry(dtype="X9"),
        entry(dtype=["U8"]),
        entry(shape=[5]),
        entry(shape=[-2, -2]),
        entry(shape=4),
        entry(data_offsets=[0, 5]),
        entry(data_offsets=[-4, 0]),
        entry(data_offsets=[4, 8]),
        entry(data_offsets=[0]),
        entry(data_offsets=[0, float("inf")]),
    ],
)
def test_what_is_no_fitting_header_is_corrupt(text):
    header = LENGTH.pack(len(text)) + text.encode()
    with pytest.raises(Corrupt, match="u: "):
        parse_header(header, size_bytes=len(header) + 4, url="u")
