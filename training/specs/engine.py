"""Where a run is placed and what its worker processes are. Times are seconds."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from storage.frozen_model import FrozenModel

DEFAULT_RECIPE = "training.trainer.pretrain:main"


class EngineSpec(FrozenModel):
    """What a job asks of every engine; the section of an engine names its kind and adds its own."""

    kind: str = Field(description="engine")
    nodes: int = Field(2, ge=1, le=64, description="nodes the job needs")
    spares: int = Field(1, ge=0, le=64, description="further nodes to reschedule onto")
    slots_per_node: int = Field(2, ge=1, le=64, description="ranks (devices) of a node")
    grace_s: float = Field(
        20.0, ge=0.1, le=900, description="seconds from SIGTERM to SIGKILL when stopping workers"
    )
    orphan_timeout_s: float = Field(
        86_400.0, ge=10, description="agents stop by themselves after this long without supervisor"
    )

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in _sections():
            raise ValueError(f"{kind!r} is no engine, choose {' or '.join(_sections())}")
        return kind

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.slots_per_node


class LocalEngineSpec(EngineSpec):
    """Nodes as agent processes on this machine."""

    kind: Literal["local"] = Field("local", description="engine")


def _sections() -> dict[str, type[EngineSpec]]:
    return {spec.model_fields["kind"].default: spec for spec in EngineSpec.__subclasses__()}


def _of_its_kind(section: Any) -> EngineSpec:
    # Not a discriminator: its schema (oneOf) is no part of Prefect's form (3.8.8), and its errors
    # have the kind in the path of the field.
    kind = section.get("kind", "local") if isinstance(section, dict) else None
    return _sections().get(str(kind), EngineSpec).model_validate(section)


# Every engine's section, as a union; one without a kind is local.
AnyEngineSpec = Annotated[LocalEngineSpec, BeforeValidator(_of_its_kind)]


class WorkerSpec(FrozenModel):
    """How deep the training program takes part: a recipe of ours or yours, or any command."""

    recipe: str | None = Field(
        None, description="session depth: module:function called in each rank with the job"
    )
    command: tuple[str, ...] | None = Field(
        None, min_length=1,
        description="command depth: started as `per` says; ${MA_NUM_HOSTS}, ${VC_TASK_INDEX}, "
        "${MASTER_ADDR}, ${MASTER_PORT} and the like, ${NNODES}, ${NODE_RANK}, ${WORLD_SIZE} are "
        "filled in; $$ is a plain $",
    )  # fmt: skip
    per: Literal["node", "device"] = Field(
        "node",
        description="of a command: started once per node, and starts its ranks itself (torchrun), "
        "or once per device, each with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    )
    cwd: str | None = Field(None, description="folder the workers start in; default: this one")

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"{value!r} is not of the form module:function")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.recipe is not None and self.command is not None:
            raise ValueError("recipe and command exclude each other, give one")
        if self.per == "device" and self.command is None:
            raise ValueError("per=device is for worker.command: a recipe is started so anyway")
        return self

    @property
    def is_command(self) -> bool:
        """Whether the program is an unchanged command (command depth)."""
        return self.command is not None

    @property
    def is_launcher(self) -> bool:
        """Whether the program is started once per node, and starts its ranks itself."""
        return self.is_command and self.per == "node"
