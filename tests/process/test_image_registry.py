"""A real registry is asked for an image, open, with passwords and with tokens."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from perdure.training.engines.kubernetes.image_registry import Credential, Presence, ask, image_name
from tests.image_registry import MISSING, PASSWORD, PROGRAM, USER, Access, ImageRegistry

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]
RIGHT = Credential(USER, SecretStr(PASSWORD))
WRONG = Credential(USER, SecretStr("battery-staple"))


@pytest.mark.parametrize("access", Access)
def test_an_image_is_found_by_whoever_may_pull_it(tmp_path, access):
    registry = ImageRegistry(tmp_path, access)
    try:
        name = registry.push("team/perdure", "1")
        here, elsewhere = image_name(name), image_name(name.replace(":1", ":none"))
        assert ask(here, [WRONG, RIGHT]).presence is Presence.FOUND
        assert ask(elsewhere, [RIGHT]).presence is Presence.ABSENT
        refused = Presence.FOUND if access is Access.ALL else Presence.DENIED
        assert ask(here, []).presence is refused
        assert ask(here, [WRONG]).presence is refused
    finally:
        registry.end()
    assert ask(here, [RIGHT]).presence is Presence.NOT_ASKED
