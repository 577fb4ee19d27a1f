"""Programs of Megatron-LM, and of MindSpeed-LLM, under Perdure.

    from perdure.integrations.megatron import take_over

    take_over()
    pretrain(...)

In a process that `perdure run` has not started it does nothing.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

from perdure.integrations.megatron_settings import check_version
from perdure.training.runtime.session import Session

_PROGRAMS = ("megatron.training.training", "mindspeed_llm.training.training")


def take_over() -> None:
    """Have `pretrain` restored, saved and watched, and recovered within its steps.

    It replaces functions of megatron.training, and of MindSpeed-LLM where that is imported: before
    `pretrain(...)`, and behind `import mindspeed_llm`.

    Raises:
        InputError: the release of megatron-core is not among those that were tested.
    """
    session = Session.current
    if session is None:
        return
    check_version(import_module("megatron.core").__version__)
    # Behind the check: it imports private names of that release.
    from perdure.integrations.megatron_loop import MegatronLoop  # noqa: PLC0415

    loop = MegatronLoop(session)
    initialize = import_module("megatron.training.initialize")
    original = initialize._initialize_distributed  # noqa: SLF001 there is no public way
    initialize._initialize_distributed = partial(loop.initialize, original)  # type: ignore[attr-defined]  # noqa: SLF001
    import_module(_PROGRAMS[0])
    for name in _PROGRAMS:
        if (module := sys.modules.get(name)) is not None:
            loop.attach(module)
