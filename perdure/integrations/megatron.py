"""Programs of Megatron-LM, and of MindSpeed-LLM, under Perdure.

    worker: {script: [pretrain_gpt.py, ...], integration: megatron}

or, without `integration`, in the script before `pretrain(...)`:

    from perdure.integrations.megatron import take_over

    take_over()

In a process that `perdure run` has not started it does nothing.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from perdure.integrations.megatron_settings import check_version
from perdure.training.runtime.session import Session

_TRAINING = ("megatron.training.training", "mindspeed_llm.training.training")
_INITIALIZE = ("megatron.training.initialize", "mindspeed_llm.training.initialize")


def take_over() -> None:
    """Have `pretrain` restored, saved and watched, and recovered within its steps.

    Functions of megatron.training, and of MindSpeed-LLM, are replaced when `pretrain` sets the
    process groups up: by then a program and its adaptors have patched all that they patch.

    Raises:
        InputError: the release of megatron-core is not among those that were tested.
    """
    session = Session.current
    if session is None:
        return
    if _INITIALIZE[0] not in sys.modules:
        sys.meta_path.insert(0, _AfterImport(session))
        return
    for name in _INITIALIZE:
        if (module := sys.modules.get(name)) is not None:
            _replace(module, session)


class _AfterImport(MetaPathFinder):
    """Replaces the function once its module is imported, and imports nothing before that.

    Adaptors such as MindSpeed's have to be imported before Megatron is.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Return Megatron's own module, with a loader that calls `_replace` behind it."""
        if fullname != _INITIALIZE[0]:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            _replace(module, self._session)

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


class _Initialize:
    """Megatron's `_initialize_distributed`, and the replacement of its loop before that."""

    def __init__(self, session: Session, original: Any) -> None:
        self._session = session
        self._original = original

    def __call__(self, *args: Any, **named: Any) -> Any:
        # Behind the check: it imports private names of a release.
        from perdure.integrations.megatron_loop import MegatronLoop  # noqa: PLC0415

        loop = MegatronLoop(self._session)
        for name in _TRAINING:
            if (module := sys.modules.get(name)) is not None:
                loop.attach(module)
        loop.lay_out()
        return self._original(*args, **named)


def _replace(module: Any, session: Session) -> None:
    original = module._initialize_distributed  # noqa: SLF001 there is no public way
    if not isinstance(original, _Initialize):
        check_version(sys.modules["megatron.core"].__version__)
        module._initialize_distributed = _Initialize(session, original)  # noqa: SLF001
