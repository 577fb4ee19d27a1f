"""A platform's recovery settings as our policy.

Each entry speaks for itself: what no entry names keeps its value. MS_ENABLE_TFT,
HIGH_AVAILABILITY and recover-strategy are complete lists: what they leave out is off.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from training.errors import InputError
from training.platforms.forms import FORMS, OTHERS
from training.platforms.settings import Reading, Setting, combine


def read_platform(entries: Mapping[str, str], *, given: Sequence[Setting] = ()) -> Reading:
    """Read annotations, labels and environment variables, all in one mapping.

    Args:
        entries: name to text, as the platform has them.
        given: what the job says itself; must not contradict the entries.

    Raises:
        InputError: an unknown name, a value that is not allowed, or two statements that
            contradict or exclude each other; names both.
    """
    settings: list[Setting] = []
    warnings: list[str] = []
    for name, text in entries.items():
        if name in OTHERS:
            warnings.append(f"{name}: {OTHERS[name]}, ignored")
            continue
        if name not in FORMS:
            raise InputError(name, f"{text!r}: no such setting; {_hint(name)}")
        for said in FORMS[name].read(name, text):
            if isinstance(said, Setting):
                settings.append(said)
            else:
                warnings.append(said)
    return combine([*settings, *given], warnings)


def _hint(name: str) -> str:
    by_leaf = {known.rpartition("/")[2]: known for known in FORMS}
    close = difflib.get_close_matches(name.rpartition("/")[2], by_leaf, n=1)
    return f"did you mean {by_leaf[close[0]]}?" if close else f"known are {', '.join(FORMS)}"
