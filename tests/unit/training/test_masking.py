"""Secrets do not leave the node, wherever the pieces of a log are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.masking import (
    MASK,
    MAX_MATCH_BYTES,
    WINDOW_BYTES,
    is_secret_name,
    mask_stream,
    mask_text,
    secret_values,
)

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def mask(text: str, *secrets: str) -> str:
    return b"".join(mask_stream([text.encode()], secrets)).decode()


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        (f"using {SECRET}, twice: {SECRET}\n", [SECRET], "using ***, twice: ***\n"),
        ("GET /?k=wJalrXUtnFEMI%2FK7MDENG%2BbPxRfiCYEXAMPLEKEY&x=1", [SECRET], "GET /?k=***&x=1"),
        ("a\nfirst-line-of-it\nsecond-line-of-it\nb\n",
         ["first-line-of-it\nsecond-line-of-it\n"], "a\n***\n***\nb\n"),
        ("abcdefgh-and-more", ["abcdefgh", "abcdefgh-and-more"], "***"),
        ("step 8 of 18", ["8"], "step 8 of 18"),
    ],
    ids=["anywhere", "within an address", "over lines", "begins with another", "too short"],
)  # fmt: skip
def test_a_known_value_is_masked_wherever_it_is_unless_it_is_short(text, secrets, shown):
    assert mask(text, *secrets) == shown


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("key AKIAIOSFODNN7EXAMPLE used", "key *** used"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=A/b, Signature=fe5f\nnext",
         "Authorization: ***\nnext"),
        ("{'Authorization': 'Bearer abcdefghijkl', 'Host': 'h'}",
         "{'Authorization': '***', 'Host': 'h'}"),
        ("headers={b'authorization': b'Basic dXNlcjpwYXNz'}", "headers={b'authorization': b'***'}"),
        ("sent bearer abcdefghijkl.mnop-q to h", "sent bearer *** to h"),
        ("https://b.s3/k?X-Amz-Credential=AK%2F2&X-Amz-Signature=0a1b2c&X-Amz-Date=1",
         "https://b.s3/k?X-Amz-Credential=***&X-Amz-Signature=***&X-Amz-Date=1"),
        ("?x-obs-security-token=gQpjbi1u&a=1", "?x-obs-security-token=***&a=1"),
        ("password=hunter2 user=me", "password=*** user=me"),
        ('{"db_password": "hunter2", "n": 1}', '{"db_password": "***", "n": 1}'),
        ("AWS_SECRET_ACCESS_KEY=short", "AWS_SECRET_ACCESS_KEY=***"),
        ("token: 0123456789abcdef0123", "token: ***"),
        ("postgres://me:hunter2@host/db", "postgres://me:***@host/db"),
        ("login hf_abcdefghijklmnopqrstuvwx", "login ***"),
        ("ghp_0123456789012345678901234567890123456", "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY.SflKxwRJSMeKKF2QT4fw", "***"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_masked(text, reported):
    assert mask(text) == reported


@pytest.mark.parametrize(
    "text",
    [
        "step 12 loss 2.5 tokens_per_s=1234 num_tokens: 512 eos_token=</s> pad_token=0",
        "https://example.com:8080/path at 12:30:01",
        "KeyError: 'hidden_size'",
        "Traceback (most recent call last):",
        "the password is asked for; secret sauce",
        '{"kind": "step", "step": 12, "loss": 5.545177459716797}',
    ],
)
def test_what_a_training_log_shows_stays(text):
    assert mask(text) == text


def test_the_lines_of_a_private_key_are_gone():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----"
    reported = mask(f"before\n{key}\nafter\n")
    assert reported == (
        "before\n-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nafter\n"
    )


def test_a_text_that_begins_within_a_private_key_has_nothing_of_it():
    text = "EowIBAAKC\nabc+/=\n-----END PRIVATE KEY-----\nafter\n-----BEGIN PRIVATE KEY-----\nMII"
    assert mask_text(text, ()) == (
        "***-----END PRIVATE KEY-----\nafter\n-----BEGIN PRIVATE KEY-----***"
    )


def test_bytes_that_are_no_text_stay_as_they_are():
    assert (
        b"".join(mask_stream([b"\xff\xfe \x00 password=abc\n"], ()))
        == b"\xff\xfe \x00 password=***\n"
    )


@given(
    cuts=st.lists(st.integers(0, 200), max_size=8),
    before=st.text(max_size=40),
    after=st.text(max_size=40),
)
def test_a_secret_that_is_cut_between_pieces_is_masked_all_the_same(cuts, before, after):
    text = f"{before} {SECRET}\n{after} password=hunter22 X-Amz-Signature={'0af1' * 8}".encode()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    reported = b"".join(mask_stream(pieces, [SECRET]))
    assert SECRET.encode() not in reported
    assert b"hunter22" not in reported
    assert b"0af10af1" not in reported
    assert reported.count(MASK) >= 3


@pytest.mark.parametrize("shift", [0, 1, 17, 39, 40, 41, 100])
def test_a_secret_at_the_edge_of_a_line_without_end_is_masked(shift):
    """A progress bar, or a dump: one line that does not end is cut, but never in a secret."""
    edge = WINDOW_BYTES - MAX_MATCH_BYTES
    text = b"x" * (edge - shift) + SECRET.encode() + b"y" * WINDOW_BYTES
    for size in (1000, 4096, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        reported = b"".join(mask_stream(pieces, [SECRET]))
        assert reported == text.replace(SECRET.encode(), MASK), (shift, size)


def test_a_line_without_end_is_given_away_before_its_end():
    pieces = iter([b"x" * (2 * WINDOW_BYTES), b"y"])
    first = next(mask_stream(pieces, ()))
    assert len(first) == 2 * WINDOW_BYTES - MAX_MATCH_BYTES


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("AWS_SECRET_ACCESS_KEY", True), ("AWS_ACCESS_KEY_ID", True), ("HF_TOKEN", True),
        ("WANDB_API_KEY", True), ("DB_PASSWORD", True), ("APIKEY", True), ("my_token", True),
        ("MYSQL_PASS", True), ("TOKENIZERS_PARALLELISM", False),
        ("PERDURE_CHECKPOINT_SERVER", False),
        ("KEYBOARD", False), ("PATH", False), ("MONKEY_ISLAND", True),
    ],
)  # fmt: skip
def test_names_decide_whether_a_variable_is_secret(name, is_secret):
    assert is_secret_name(name) is is_secret


def test_secret_values_are_those_of_secret_names():
    assert secret_values({"HF_TOKEN": "abc", "HOME": "/root"}) == {"abc"}
