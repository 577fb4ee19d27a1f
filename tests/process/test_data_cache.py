"""Prepared data is a cached result of Prefect's own, and only as long as it is there and whole."""

from __future__ import annotations

import json
import logging

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOCAL_STORAGE_PATH,
    temporary_settings,
)

from perdure.flows.pretrain import prepare
from perdure.storage.address import open_store
from perdure.training.config.job import parse_job
from perdure.training.trainer.data.corpus import CorpusError
from tests.waiting import apart, wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]


class Corpus:
    """A corpus that flow runs of the deployment `prepare-data` prepare, each on a new node."""

    def __init__(self, bench, api, folder, caplog) -> None:
        self.api, self.folder, self.caplog = api, folder, caplog
        self.document = {**bench.pair("any"), "storage": {"address": f"file://{folder}/store"}}
        self.store = open_store(parse_job(self.document).storage)

    def prepare(self, run_id: str, **changes) -> tuple[str, list[str]]:
        """State of the task, and what was logged."""
        job = parse_job({**self.document, "run_id": run_id, **changes})
        node = {
            PREFECT_API_URL: self.api.url,
            PREFECT_LOCAL_STORAGE_PATH: self.folder / run_id,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        }
        self.caplog.clear()
        with temporary_settings(node):
            apart(lambda: prepare(job))
        assert not (self.folder / run_id).exists(), "Prefect keeps no result on the node"
        return self.state(run_id), self.caplog.messages

    def state(self, run_id: str) -> str:
        """How the task ended, as the server has it."""
        states = wait_for(
            lambda: [
                state
                for name, state in self.api.task_runs(run_id).items()
                if name == "prepare_data" and state not in ("Pending", "Running")
            ],
            timeout_s=30,
            what="the end of prepare_data",
        )
        return states[0]

    def keys(self, prefix: str) -> list[str]:
        return [info.key for info in self.store.list(prefix)]


@pytest.fixture
def corpus(bench, api, tmp_path, caplog) -> Corpus:
    caplog.set_level(logging.INFO)
    return Corpus(bench, api, tmp_path, caplog)


def test_a_corpus_that_is_prepared_is_cached_until_something_of_it_is_gone(corpus):
    state, _ = corpus.prepare("data-made")
    assert state == "Completed"
    shards = corpus.keys("data/shards/")
    state, lines = corpus.prepare("data-found")
    assert state == "Cached"
    assert [line for line in lines if line.startswith("the corpus is prepared already")]

    corpus.store.delete(shards[1])
    state, lines = corpus.prepare("data-vanished")
    assert state == "Completed"
    assert any(shards[1] in line and "made again" in line for line in lines)
    assert corpus.prepare("data-mended")[0] == "Cached"


@pytest.mark.long
def test_a_result_that_is_damaged_or_from_a_stranger_is_redone_and_not_read(corpus, tmp_path):
    assert corpus.prepare("data-first")[0] == "Completed"
    (manifest,) = corpus.keys("data/manifests/")
    whole = corpus.store.get(manifest)
    corpus.store.put(manifest, whole[: len(whole) // 2])
    state, lines = corpus.prepare("data-cut-off")
    assert state == "Completed"
    assert any("manifest is damaged" in line for line in lines)
    assert corpus.store.get(manifest) == whole

    # What Prefect's own reader of results would carry out.
    mark = tmp_path / "mark"
    record = {
        "metadata": {"serializer": {"type": "json"}, "storage_key": manifest},
        "result": json.dumps({"__class__": "pathlib.Path.touch", "data": str(mark)}),
    }
    corpus.store.put(manifest, json.dumps(record).encode())
    assert corpus.prepare("data-strange")[0] == "Completed"
    assert corpus.store.get(manifest) == whole
    assert not mark.exists()


@pytest.mark.long
def test_a_store_without_the_result_and_other_inputs_have_the_data_made(corpus):
    assert corpus.prepare("data-before")[0] == "Completed"
    (manifest,) = corpus.keys("data/manifests/")
    corpus.store.delete(manifest)
    state, _ = corpus.prepare("data-no-manifest")
    assert state == "Completed"
    other = {**corpus.document["data"], "shard_size_bytes": 16384}
    assert corpus.prepare("data-other", data=other)[0] == "Completed"
    assert len(corpus.keys("data/manifests/")) == 2


@pytest.mark.long
def test_a_corpus_that_cannot_be_read_fails_with_its_own_reason(corpus, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no JSON")
    with pytest.raises(CorpusError, match=r"broken\.jsonl"):
        corpus.prepare("data-broken", data={**corpus.document["data"], "sources": [str(broken)]})
    assert corpus.state("data-broken") == "Failed"
    assert not [line for line in corpus.caplog.messages if "persisting" in line]
