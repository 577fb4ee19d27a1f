"""All nodes of a run find the same secret, and nobody else has it."""

from __future__ import annotations

import pytest

from perdure.training.engines.launched.secret import (
    SECRET_ENV,
    LaunchSecret,
    find_secret,
    keep_secret,
)
from perdure.training.errors import InputError

LONG = "sixteen characters, or more"
KEYS = {"AWS_SECRET_ACCESS_KEY": "the key of the store"}


def same(first: LaunchSecret, second: LaunchSecret) -> bool:
    return first.sign("text") == second.sign("text")


def test_nodes_that_share_a_folder_a_key_or_a_variable_have_the_same_secret(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"

    def find(home, environment=(), keys=()):
        return find_secret("run", home=home, environment=dict(environment), store_keys=dict(keys))

    assert same(find(here), find(here))
    assert not same(find(here), find(there))
    assert same(find(here, keys=KEYS), find(there, keys=KEYS))
    assert same(find(here, {SECRET_ENV: LONG}, KEYS), find(there, {SECRET_ENV: LONG}))


def test_the_secret_of_a_folder_is_for_its_owner_alone(tmp_path):
    find_secret("run", home=tmp_path, environment={}, store_keys={})
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_runs_with_the_same_key_have_different_secrets(tmp_path):
    first, second = (
        find_secret(run_id, home=tmp_path, environment={}, store_keys=KEYS)
        for run_id in ("first", "second")
    )
    assert not same(first, second)


def test_a_secret_that_was_given_is_kept_for_the_supervisor_of_the_node(tmp_path):
    given = tmp_path / "secret"
    given.write_text(f"{LONG}\n")
    keep_secret("run", home=tmp_path, file=given, environment={})
    kept = find_secret("run", home=tmp_path, environment={}, store_keys=KEYS)
    assert same(kept, LaunchSecret(LONG, "run"))
    assert (tmp_path / "runs" / "run" / "launch-secret").stat().st_mode & 0o077 == 0


def test_nothing_is_kept_where_nothing_was_given(tmp_path):
    keep_secret("run", home=tmp_path, file=None, environment={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("short", "--secret-file: has 5 characters, and at least 16 are needed"),
        (None, "--secret-file: .*No such file"),
    ],
)
def test_a_secret_that_is_none_is_one_line(tmp_path, content, message):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        find_secret("run", home=tmp_path, file=file, environment={}, store_keys={})


def test_tokens_of_nodes_and_lives_differ():
    secret = LaunchSecret(LONG, "run")
    tokens = {secret.token(node, life) for node in ("a", "b") for life in ("1", "2")}
    assert len(tokens) == 4
