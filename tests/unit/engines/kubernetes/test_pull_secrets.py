"""Which users of registries a Secret names, and for which images they are."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from perdure.training.engines.kubernetes.image_registry import (
    KIND,
    OLD_KIND,
    credentials_of,
    image_name,
)


def secret(auths: Any) -> dict[str, Any]:
    content = json.dumps({"auths": auths}).encode()
    data = {".dockerconfigjson": base64.b64encode(content).decode()}
    return {"type": KIND, "data": data}


def user(name: str) -> dict[str, str]:
    return {"username": name, "password": f"of-{name}"}


@pytest.mark.parametrize(
    ("key", "image", "fits"),
    [
        ("registry.example.com", "registry.example.com/a/b:1", True),
        ("https://registry.example.com/v2/", "registry.example.com/a/b:1", True),
        ("registry.example.com/a", "registry.example.com/a/b:1", True),
        ("registry.example.com/c", "registry.example.com/a/b:1", False),
        ("registry.example.com", "registry.example.com:5000/a:1", False),
        ("registry.example.com:5000", "registry.example.com:5000/a:1", True),
        ("*.example.com", "registry.example.com/a:1", True),
        ("*.example.com", "a.registry.example.com/a:1", False),
        ("https://index.docker.io/v1/", "python:3.12", True),
        ("docker.io", "python:3.12", True),
    ],
)
def test_a_user_is_for_the_images_that_a_node_would_use_it_for(key, image, fits):
    users = credentials_of(secret({key: user("robot")})).for_image(image_name(image))
    assert [user.username for user in users] == (["robot"] if fits else [])


def test_the_user_of_the_longest_path_goes_first():
    auths = {"r.example.com": user("all"), "r.example.com/team": user("team")}
    users = credentials_of(secret(auths)).for_image(image_name("r.example.com/team/a:1"))
    assert [user.username for user in users] == ["team", "all"]


def test_name_and_password_may_be_in_one_word_and_a_helper_has_none():
    auths = {
        "a.example.com": {"auth": base64.b64encode(b"robot:with:colons").decode()},
        "b.example.com": {},
    }
    credentials = credentials_of(secret(auths))
    (user,) = credentials.for_image(image_name("a.example.com/a"))
    assert (user.username, user.password.get_secret_value()) == ("robot", "with:colons")
    assert credentials.for_image(image_name("b.example.com/a")) == []


@pytest.mark.parametrize("word", ["robot:pw", "robot:pass", "robot:passw"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_the_word_may_lack_its_padding_and_wins_over_name_and_password(word, is_padded):
    auth = base64.b64encode(word.encode()).decode()
    entry = user("other") | {"auth": auth if is_padded else auth.rstrip("=")}
    credentials = credentials_of(secret({"a.example.com": entry, "b.example.com": user("b")}))
    (one,) = credentials.for_image(image_name("a.example.com/a"))
    assert f"{one.username}:{one.password.get_secret_value()}" == word
    assert credentials.for_image(image_name("b.example.com/a"))


def test_a_secret_of_the_old_type_has_the_users_one_level_up():
    content = base64.b64encode(json.dumps({"r.example.com": user("robot")}).encode()).decode()
    credentials = credentials_of({"type": OLD_KIND, "data": {".dockercfg": content}})
    (one,) = credentials.for_image(image_name("r.example.com/a"))
    assert (one.username, one.password.get_secret_value()) == ("robot", "of-robot")


@pytest.mark.parametrize(
    "document",
    [
        {"type": "Opaque", "data": {"word": "c2VjcmV0"}},
        {"type": KIND},
        {"type": OLD_KIND},
        {"type": OLD_KIND, "data": secret({})["data"]},
        {"type": KIND, "data": {".dockerconfigjson": "c2VjcmV0"}},
        secret([]),
        secret({"r.example.com": {"auth": "secret"}}),
        secret({"r.example.com": {"auth": base64.b64encode(b"secret").decode()}}),
    ],
)
def test_what_cannot_be_read_is_said_without_its_content(document):
    with pytest.raises(ValueError, match=r"type is|is no configuration") as raised:
        credentials_of(document)
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
