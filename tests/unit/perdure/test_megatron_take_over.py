"""When Megatron's loop is taken over: behind the import of its modules, and by whoever asks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perdure.integrations import megatron
from perdure.training.errors import InputError
from perdure.training.runtime.session import Session

INITIALIZE = "megatron.training.initialize"


def is_replaced(module: ModuleType) -> bool:
    return isinstance(module._initialize_distributed, megatron._Initialize)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Megatron of some release in the least form; returns how to make it."""

    def install(version: str) -> None:
        for name, text in (
            ("core/__init__.py", f"__version__ = {version!r}\n"),
            ("training/__init__.py", "import megatron.core\n"),
            ("training/initialize.py", "def _initialize_distributed(): return 'as ever'\n"),
        ):
            path = tmp_path / "megatron" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(Session, "current", object())
    before = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "megatron"}
    for name in before:
        del sys.modules[name]
    yield install
    for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("times", [1, 2])
def test_nothing_of_megatron_is_imported_before_the_program_does(installed, times):
    installed("0.16.1")
    for _ in range(times):
        megatron.take_over()
    assert not [name for name in sys.modules if name.startswith("megatron")]
    assert is_replaced(importlib.import_module(INITIALIZE))
    assert not any(isinstance(finder, megatron._AfterImport) for finder in sys.meta_path[1:])


def test_a_module_that_is_there_is_taken_over_at_once_and_once(installed):
    installed("0.16.1")
    module = importlib.import_module(INITIALIZE)
    megatron.take_over()
    replaced = module._initialize_distributed
    megatron.take_over()
    assert is_replaced(module)
    assert module._initialize_distributed is replaced


@pytest.mark.parametrize("is_imported", [False, True])
def test_another_release_is_refused_when_it_is_imported(installed, is_imported):
    installed("0.19.2")
    if is_imported:
        importlib.import_module(INITIALIZE)
    with pytest.raises(InputError, match=r"megatron-core: 0\.19\.2: "):  # noqa: PT012 either line
        megatron.take_over()
        importlib.import_module(INITIALIZE)


def test_without_perdure_run_the_program_stays_as_it_is(installed, monkeypatch):
    installed("0.19.2")
    monkeypatch.setattr(Session, "current", None)
    megatron.take_over()
    assert importlib.import_module(INITIALIZE)._initialize_distributed() == "as ever"


def test_an_adaptor_has_its_own_copy_of_the_function_replaced_too(installed, monkeypatch):
    installed("0.16.1")
    module = importlib.import_module(INITIALIZE)
    adaptor: Any = ModuleType("mindspeed_llm.training.initialize")
    adaptor._initialize_distributed = module._initialize_distributed
    monkeypatch.setitem(sys.modules, adaptor.__name__, adaptor)
    megatron.take_over()
    assert is_replaced(module)
    assert is_replaced(adaptor)
