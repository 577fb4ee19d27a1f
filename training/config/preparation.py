"""The data preparation of a job whose program reads its data itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from perdure.storage.frozen_model import SettingsModel


class PrepareSpec(SettingsModel):
    """A command that prepares data before the program starts, where that is not done already."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description="program and arguments, started in worker.cwd with the job's env (not "
        "env_from); $NAME is filled in, also $PERDURE_NODE, and $$ is a plain $",
    )
    inputs: tuple[str, ...] = Field(
        (),
        description="files, folders and patterns (raw/*.jsonl) that the command reads: it runs "
        "again when one of them has another size or time",
    )
    outputs: tuple[str, ...] = Field(
        min_length=1,
        description="files and folders that the command writes: it runs again when a file of "
        "them is missing or has other content",
    )
    per: Literal["run", "node"] = Field(
        "run",
        description="run: once, on the first node, for outputs that all nodes see; node: on each "
        "node, for outputs on its own disk",
    )

    @field_validator("inputs", "outputs")
    @classmethod
    def _check_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not path.strip():
                raise ValueError(f"{path!r} is no path")
        return paths
