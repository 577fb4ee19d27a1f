"""Which deployment starts a run that has lost its flow run."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from prefect.client.schemas.objects import DeploymentStatus
from prefect.client.schemas.responses import DeploymentResponse

from perdure.tasks.relaunch import AUTO_RESUME, choose


def deployment(name: str, pool: str | None, **changes: Any) -> DeploymentResponse:
    facts: dict[str, Any] = {
        "id": uuid4(), "flow_id": uuid4(), "tags": [AUTO_RESUME],
        "status": DeploymentStatus.READY, **changes,
    }  # fmt: skip
    return DeploymentResponse(name=name, work_pool_name=pool, **facts)


FIRST = deployment("a-first", "elsewhere")
LOCAL = deployment("local", "perdure")
SERVED = deployment("served", None)
ASKING = deployment("each-minute", "perdure", tags=[])


def test_the_deployment_of_the_last_flow_run_is_used_again():
    assert choose([FIRST, LOCAL, SERVED], last=SERVED.id, caller=ASKING) is SERVED


def test_without_one_it_is_a_deployment_that_the_same_worker_or_process_serves():
    found = [FIRST, deployment("other", None), SERVED, LOCAL]
    assert choose(found, last=None, caller=ASKING) is LOCAL
    assert choose(found, last=uuid4(), caller=ASKING) is LOCAL
    assert choose(found, last=None, caller=deployment("served", None, tags=[])) is SERVED


def test_where_none_is_served_with_it_a_run_of_elsewhere_is_not_started():
    assert choose([FIRST, SERVED], last=None, caller=ASKING) is None
    assert choose([FIRST], last=None, caller=None) is None


def test_a_deployment_that_nothing_serves_or_that_is_not_brought_back_is_passed_over():
    asleep = deployment("local", "perdure", status=DeploymentStatus.NOT_READY)
    untagged = deployment("untagged", "perdure", tags=["perdure"])
    assert choose([asleep, untagged, LOCAL], last=asleep.id, caller=ASKING) is LOCAL
    assert choose([asleep, untagged], last=asleep.id, caller=ASKING) is None
