"""The names of faults in plain words: of their class, and of the code in its code book.

The names are in fault_names.toml, in English and Chinese: reports are read by people who know
neither our classes nor the codes of chips.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from perdure.training.recovery.chips import chip_fact
from perdure.training.recovery.faults import Fault


@dataclass(frozen=True, slots=True)
class FaultName:
    """The name of a fault.

    Attributes:
        english: of its class.
        chinese: of its class, in Chinese.
        title: of its code in the code book, in both languages as far as it has them; may be empty.
    """

    english: str
    chinese: str
    title: str

    @property
    def text(self) -> str:
        """The name and the title, for people."""
        title = f": {self.title}" if self.title else ""
        return f"{self.english} ({self.chinese}){title}"


def name_fault(fault: Fault) -> FaultName:
    """Name a fault by its class and its code."""
    tables, kind = _tables(), fault.fault_class.value
    return FaultName(tables["english"][kind], tables["chinese"][kind], _title_of(fault.code))


def _title_of(code: str | None) -> str:
    fact = chip_fact(code) if code is not None else None
    chinese = _tables()["chinese_titles"].get(code or "", "")
    cause = fact.cause if fact is not None else ""
    english = cause or _tables()["english_titles"].get(code or "", "")
    return f"{english} ({chinese})" if english and chinese else english or chinese


@cache
def _tables() -> Mapping[str, Mapping[str, str]]:
    text = files("perdure.training.recovery").joinpath("fault_names.toml").read_text("utf-8")
    return tomllib.loads(text)
