"""Start a node agent: `python -m perdure.training.agent FOLDER [CONFIG]`.

The file is FOLDER/agent.json unless it is named. An engine may not know node and address before a
container is placed: the container's environment then has them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from perdure.training.agent.agent import CONFIG_FILE, Agent
from perdure.training.agent.preparation import LIFE_PREFIX
from perdure.training.environment import worker_path
from perdure.training.injection.outside import lose_node_on_signal
from perdure.training.log import start_logging
from perdure.training.processes import DIES_WITH_PARENT, MARKER, die_with_parent, raise_open_files
from perdure.training.wire.agent import AgentConfig

NODE_ENV = "PERDURE_NODE"
HOST_ENV = "PERDURE_HOST"


def main() -> None:
    """Run the agent of the container whose scratch folder is the first argument."""
    start_logging()
    if parent := os.environ.pop(DIES_WITH_PARENT, ""):
        die_with_parent(int(parent))
    raise_open_files()
    os.environ["PATH"] = worker_path()
    folder = Path(sys.argv[1])
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / CONFIG_FILE
    config = _with_place(
        AgentConfig.model_validate_json(file.read_text(encoding="utf-8")), os.environ
    )
    if config.node_folder is not None:
        _delete_other_lives(Path(config.node_folder))
    if config.is_drill:
        lose_node_on_signal(os.environ[MARKER])
    Agent(config, folder).run()


def _with_place(config: AgentConfig, environment: Mapping[str, str]) -> AgentConfig:
    """Return the configuration with the node and the address of the container."""
    variables = {"node": environment.get(NODE_ENV), "host": environment.get(HOST_ENV)}
    return config.model_copy(update={name: value for name, value in variables.items() if value})


def _delete_other_lives(folder: Path) -> None:
    """Free the node's disk of deleted runs of the same name."""
    for other in folder.parent.glob(f"{LIFE_PREFIX}*"):
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    main()
