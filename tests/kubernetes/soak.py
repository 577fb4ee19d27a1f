"""A long run on a site where one thing after the other happens, and whose state is true throughout.

PERDURE_SOAK_S sets its length, an hour by default: `python -m tests.kubernetes.lab soak`.
"""

from __future__ import annotations

import itertools
import os

import pytest

from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.runs import (
    ClusterRuns,
    Deed,
    assert_as_undisturbed,
    file_of,
    perdure,
    powers_off,
)
from tests.kubernetes.test_refusals import refused_by_webhook, refused_rights
from tests.kubernetes.test_room import cordoned_nodes, image_gone, used_up_quota
from tests.kubernetes.test_silence import unheard_agents

SOAK_S = float(os.environ.get("PERDURE_SOAK_S", "3600"))
EVERY_S = 120.0  # an event, with the recovery from it
RESTS_S = 50.0  # of training between two
PACE_S = 0.5
MARGIN = 200  # steps; nothing is under way when the run ends

pytestmark = [pytest.mark.process, pytest.mark.timeout(0)]


def looked_at(runs: ClusterRuns, deed: Deed) -> Deed:
    """The same once `perdure status` says that the run trains, and waits for nothing."""

    def do(run: RunSupervisor) -> None:
        run.ledger.renew()
        status = perdure(runs, file_of(runs, run.job), "status")
        assert "running" in status, status
        assert "waiting" not in status, status
        deed.what(run)

    return Deed(do, ends_attempt=deed.ends_attempt)


def node_lost_for_a_while(lab: Lab) -> Deed:
    """A node loses its power, and has it again once the cluster has noticed."""

    def lose(run: RunSupervisor) -> None:
        powers_off(lab, 1).what(run)
        lab.restore()

    return Deed(lose)


def test_a_run_on_a_troubled_site_loses_no_digit_and_tells_the_truth(
    runs, lab, create, bind, webhook, silence, without_image
):
    events = [
        refused_rights(runs, bind),
        used_up_quota(runs, create),
        unheard_agents(silence),
        *refused_by_webhook(runs, webhook),
        cordoned_nodes(runs, lab),
        image_gone(runs, lab, without_image),
        node_lost_for_a_while(lab),
    ]
    count = max(1, round(SOAK_S / EVERY_S))
    deeds = [looked_at(runs, deed) for deed in itertools.islice(itertools.cycle(events), count)]
    restart = {"node_replace": False, "pod_retries": count, "max_restarts": count}
    steps = round(count * RESTS_S / PACE_S) + MARGIN
    job = runs.job("soak", steps=steps, pace_s=PACE_S, restart=restart)
    played = runs.run(job, *deeds, limit_s=4 * SOAK_S + 1800, rests_s=RESTS_S)
    assert_as_undisturbed(played, runs.undisturbed(job))
    assert not any(view.failed_rungs for view in played.history.attempts)
