"""Where MindCluster's reports cannot be had, one line says so and nothing is held against nodes."""

from __future__ import annotations

import socket

from kubernetes import client

from perdure.training.engines.kubernetes.api import Api
from perdure.training.engines.kubernetes.fault_feed import FaultFeed


def test_an_api_server_that_is_away_is_one_warning_for_all_nodes(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = client.Configuration()
    settings.host = f"http://127.0.0.1:{port}"
    settings.retries = False
    feed = FaultFeed(Api(client.ApiClient(settings), "default", in_cluster=False))
    assert feed.of_run([f"n{index}" for index in range(100)]) == {}
    (line,) = (record.getMessage() for record in caplog.records if record.name == "perdure.engine")
    assert line.startswith("MindCluster's reports are not known: the API server cannot be reached")
