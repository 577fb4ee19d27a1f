"""Whether a job's image can be had: what nodes have of it, and what its registry says. No pod.

What a registry says holds for this machine. Nodes may reach it where this one does not, and have
mirrors and credentials of their own: what only they can know is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perdure.training.engines.kubernetes.image_registry import (
    Answer,
    Credential,
    ImageName,
    Presence,
    ask,
    image_name,
)
from perdure.training.engines.kubernetes.nodes import image_nodes
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.wire.node import Check, CheckOutcome

NAME = "image"


@dataclass(slots=True)
class PullSecrets:
    """The Secrets that a pod pulls with, and what they have for one image.

    Attributes:
        names: of all.
        credentials: in the order in which nodes try them.
        unknown: names of those that must not be read.
    """

    names: Sequence[str]
    credentials: list[Credential] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def check_image(
    image: str,
    *,
    policy: str,
    nodes: Sequence[Document] | None,
    read_secrets: Callable[[ImageName], PullSecrets],
    ask_registry: Callable[[ImageName, Sequence[Credential]], Answer] = ask,
) -> Check:
    """Check an image.

    Args:
        image: its name, as the job has it.
        policy: its imagePullPolicy.
        nodes: all of the cluster; None: they may not be looked at.
        read_secrets: reads the pod's Secrets for an image; called when the registry is asked.
        ask_registry: asks it.
    """
    try:
        name = image_name(image)
    except ValueError as error:
        return _check(CheckOutcome.FAILED, str(error))
    held, is_everywhere = _held(image, nodes)
    if policy == "Never":
        outcome = CheckOutcome.OK if held else CheckOutcome.WARNING
        outcome = outcome if nodes is not None else CheckOutcome.SKIPPED
        return _check(outcome, f"{image} {held or _UNHELD}; imagePullPolicy is Never")
    if is_everywhere and policy == "IfNotPresent":
        return _check(CheckOutcome.OK, f"{image} {held}")
    secrets = read_secrets(name)
    outcome, verdict = _verdict(
        name, ask_registry(name, secrets.credentials), secrets, is_held=bool(held)
    )
    return _check(outcome, f"{image} {verdict}" + (f"; it {held}" if held else ""))


# A node lists its 50 largest images.
_UNHELD = "is on no node's list"


def _held(image: str, nodes: Sequence[Document] | None) -> tuple[str, bool]:
    """Which nodes have an image, "" where none is known, and whether all have it."""
    having = image_nodes(image, nodes or ())
    if not having:
        return "", False
    of_all = len(nodes or ())
    return f"has been pulled on {len(having)} of {of_all} nodes", len(having) == of_all


def _verdict(
    name: ImageName, answer: Answer, secrets: PullSecrets, *, is_held: bool
) -> tuple[CheckOutcome, str]:
    """How a registry's answer counts, and in which words."""
    registry = name.registry
    match answer.presence:
        case Presence.FOUND:
            return CheckOutcome.OK, f"is in its registry {registry}"
        case Presence.ABSENT:
            # A node that has it pulled it: from a mirror, perhaps, where others can, too.
            outcome = CheckOutcome.WARNING if is_held else CheckOutcome.FAILED
            return outcome, f"is not in its registry: of {registry}, {answer.said}"
        case Presence.NOT_ASKED:
            text = f"could not be asked for from here; nodes may reach {registry}: {answer.said}"
            return CheckOutcome.SKIPPED, text
        case Presence.DENIED:
            return _denied(f"is refused by its registry {registry} ({answer.said})", secrets)


def _denied(refused: str, secrets: PullSecrets) -> tuple[CheckOutcome, str]:
    if secrets.unknown:
        names = ", ".join(secrets.unknown)
        return CheckOutcome.SKIPPED, f"{refused} without the pull secret {names}, not to be read"
    if secrets.names and secrets.credentials:
        return CheckOutcome.FAILED, f"{refused} with the pull secret {', '.join(secrets.names)}"
    if secrets.names:
        text = f"{refused}, and the pull secret {', '.join(secrets.names)} has nothing for it"
    else:
        text = f"{refused}, and the job names no pull secret (engine.image_pull_secrets)"
    return CheckOutcome.WARNING, f"{text}: nodes need credentials of their own"


def _check(outcome: CheckOutcome, finding: str) -> Check:
    return Check(name=NAME, outcome=outcome, seen=finding)
