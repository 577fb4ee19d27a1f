"""Start a node agent: `python -m training.agent FOLDER`, FOLDER holding its agent.json."""

from __future__ import annotations

import sys
from pathlib import Path

from training.agent.agent import CONFIG_FILE, Agent
from training.log import start_logging
from training.wire.agent import AgentConfig


def main() -> None:
    """Run the agent of the container whose scratch folder is the only argument."""
    start_logging()
    folder = Path(sys.argv[1])
    config = AgentConfig.model_validate_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    Agent(config, folder).run()


if __name__ == "__main__":
    main()
