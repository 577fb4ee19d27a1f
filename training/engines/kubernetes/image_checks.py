"""The check of a job's image: which nodes have it, and whether its registry does. No pod starts.

A registry's answer holds for this machine. Nodes may reach a registry that this machine does not,
and have mirrors and credentials of their own: the check skips what only they can know.
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
    """The Secrets that a pod pulls with, and their credentials for an image.

    Attributes:
        names: names of all these Secrets.
        credentials: in the order in which nodes try them.
        unknown: names of the Secrets that this process may not read.
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
        image: the image's name in the job.
        policy: the container's imagePullPolicy.
        nodes: all nodes of the cluster; None: this process may not read them.
        read_secrets: reads the pod's Secrets for an image; called before the registry is asked.
        ask_registry: asks the registry.
    """
    try:
        name = image_name(image)
    except ValueError as error:
        return _check(CheckOutcome.FAILED, str(error))
    having = image_nodes(image, nodes or ())
    held = f"has been pulled on {len(having)} of {len(nodes or ())} nodes" if having else ""
    if policy == "Never":
        outcome = CheckOutcome.OK if held else CheckOutcome.WARNING
        outcome = outcome if nodes is not None else CheckOutcome.SKIPPED
        return _check(outcome, f"{image} {held or _UNHELD}; imagePullPolicy is Never")
    if having and len(having) == len(nodes or ()) and policy == "IfNotPresent":
        return _check(CheckOutcome.OK, f"{image} {held}")
    secrets = read_secrets(name)
    outcome, verdict = _verdict(
        name, ask_registry(name, secrets.credentials), secrets, is_held=bool(held)
    )
    return _check(outcome, f"{image} {verdict}" + (f"; it {held}" if held else ""))


# A node lists its 50 largest images.
_UNHELD = "is on no node's list"


def _verdict(
    name: ImageName, answer: Answer, secrets: PullSecrets, *, is_held: bool
) -> tuple[CheckOutcome, str]:
    """Judge a registry's answer. Returns the outcome of the check and its words."""
    registry = name.registry
    match answer.presence:
        case Presence.FOUND:
            return CheckOutcome.OK, f"is in its registry {registry}"
        case Presence.ABSENT:
            # A node that has the image pulled it, perhaps from a mirror that the others reach, too.
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
