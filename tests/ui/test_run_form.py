"""The form of a run in both UIs of Prefect: what it begins with, and jobs by name."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.ui, pytest.mark.prefect, pytest.mark.long]

DEPLOY = "from perdure.flows.pretrain import pretrain; pretrain.to_deployment(name='form').apply()"


@pytest.mark.parametrize("ui", ["", "/v2"])
def test_the_form_begins_with_what_has_no_default_in_the_words_of_a_job_file(
    bench, api, visitor, ui
):
    done = bench.python("-c", DEPLOY)
    assert done.returncode == 0, done.stderr
    deployment = api.deployment("pretrain/form")
    page = visitor.goto(f"{ui}/deployments/deployment/{deployment['id']}/run")
    tops = []
    for field in ("run_id", "storage", "address", "seed"):
        label = page.get_by_text(field, exact=True).or_(page.get_by_text(f"{field} (Optional)"))
        expect(label.first).to_be_visible()
        box = label.first.bounding_box()
        assert box is not None
        tops.append(box["y"])
    assert tops == sorted(tops)
    expect(page.get_by_text("name of a job", exact=True)).to_be_visible()
    visitor.keep(f"run-form{ui.replace('/', '-')}")
