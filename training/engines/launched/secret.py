"""The secret of a launched run, and what is derived from it.

All nodes of a run have the same secret without asking each other: from a file, from a variable,
from the key of the store, or from a file in Perdure's folder, where that is shared. It never
stands in the store, in the environment of another process, or in a log. A node's token is derived
from it, and signatures show that a message comes from somebody who has it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from perdure.training.errors import InputError
from perdure.training.files import private_folder, write_whole

SECRET_ENV = "PERDURE_LAUNCH_SECRET"  # noqa: S105 a variable's name
_STORE_KEY = "AWS_SECRET_ACCESS_KEY"
_KEPT = "launch-secret"
_SHORTEST = 16


class LaunchSecret:
    """The secret of one run.

    Args:
        base: what all nodes have; runs that share it have different secrets all the same.
        run_id: name of the run.
    """

    def __init__(self, base: str, run_id: str) -> None:
        self._key = hmac.digest(base.encode(), f"perdure launch {run_id}".encode(), hashlib.sha256)

    def token(self, node: str, instance: str) -> str:
        """The token of requests to a node's `perdure launch`."""
        return self.sign(f"token {node} {instance}")

    def sign(self, text: str) -> str:
        """Sign a text."""
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()

    def is_signed(self, text: str, signature: str) -> bool:
        """Whether a signature is of this secret; compared in constant time."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode())


def find_secret(
    run_id: str,
    *,
    home: Path,
    file: Path | None = None,
    environment: Mapping[str, str],
    store_keys: Mapping[str, str],
) -> LaunchSecret:
    """Find the secret of a run; made anew in Perdure's folder where nothing gives one.

    Args:
        run_id: name of the run.
        home: Perdure's folder.
        file: named by the user.
        environment: variables of this process.
        store_keys: the store's keys, as variables.

    Raises:
        InputError: the secret cannot be read, or is too short.
    """
    home_file = home / "runs" / run_id / _KEPT
    if file is not None:
        return LaunchSecret(_checked(_read(file, "--secret-file"), "--secret-file"), run_id)
    if environment.get(SECRET_ENV):
        return LaunchSecret(_checked(environment[SECRET_ENV], SECRET_ENV), run_id)
    with suppress(FileNotFoundError):
        return LaunchSecret(home_file.read_text(encoding="utf-8").strip(), run_id)
    if store_keys.get(_STORE_KEY):
        return LaunchSecret(store_keys[_STORE_KEY], run_id)
    return LaunchSecret(_of_this_home(home), run_id)


def keep_secret(
    run_id: str, *, home: Path, file: Path | None, environment: Mapping[str, str]
) -> None:
    """Note a secret that was given for the supervisor on this node, which nobody gives it again.

    Raises:
        InputError: it cannot be read, or is too short.
    """
    if file is not None:
        base = _checked(_read(file, "--secret-file"), "--secret-file")
    elif environment.get(SECRET_ENV):
        base = _checked(environment[SECRET_ENV], SECRET_ENV)
    else:
        return
    folder = private_folder(home / "runs" / run_id)
    write_whole(folder / _KEPT, base, private=True)


def _of_this_home(home: Path) -> str:
    """Read the secret of Perdure's folder, which the first reader makes."""
    path = private_folder(home) / _KEPT
    if not path.exists():
        draft = path.with_name(f"{_KEPT}.{secrets.token_hex(4)}")
        write_whole(draft, secrets.token_hex(32), private=True)
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, it does not replace another node's
        draft.unlink()
    return path.read_text(encoding="utf-8").strip()


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InputError(field, f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _checked(text: str, field: str) -> str:
    if len(text) < _SHORTEST:
        raise InputError(field, f"has {len(text)} characters, and at least {_SHORTEST} are needed")
    return text
