"""Names of images, completed as container runtimes complete them."""

from __future__ import annotations

import pytest

from perdure.training.engines.kubernetes.image_registry import ImageName, image_name

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python", ImageName("docker.io", "library/python", "latest")),
        ("python:3.12-slim", ImageName("docker.io", "library/python", "3.12-slim")),
        ("docker.io/python", ImageName("docker.io", "library/python", "latest")),
        ("prefecthq/prefect:3", ImageName("docker.io", "prefecthq/prefect", "3")),
        ("registry.example.com/a/b:1", ImageName("registry.example.com", "a/b", "1")),
        ("localhost/perdure:1", ImageName("localhost", "perdure", "1")),
        ("registry:5000/perdure", ImageName("registry:5000", "perdure", "latest")),
        (f"quay.io/a/b@{DIGEST}", ImageName("quay.io", "a/b", DIGEST)),
        (f"quay.io/a/b:9.1@{DIGEST}", ImageName("quay.io", "a/b", DIGEST)),
    ],
)
def test_a_name_has_registry_repository_and_reference(text, expected):
    assert image_name(text) == expected
    assert image_name(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "no image", "UPPER/case", "a//b", "a:", ":1", "a:b:c", "a@sha256:12", "a/../b"]
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ValueError, match="is no name of an image"):
        image_name(text)
