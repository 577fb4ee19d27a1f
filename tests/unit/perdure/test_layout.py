"""From the sizes in a job file to what preflight says of replicas, and what the ladder takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.training.recovery.rungs import LADDER, Rung
from tests.jobs import job_document
from tests.unit.perdure.commands import perdure

Sizes = Mapping[str, Any]

ALL = "8 copies of every shard: [0, 1, 2, 3, 4, 5, 6, 7]"
PAIRS = "2 copies of every shard: [0, 4] [1, 5] [2, 6] [3, 7]"
NODE = "; a lost node takes every copy of {} with it"
# On four nodes of two ranks.
POSSIBLE: list[tuple[Sizes, str]] = [
    ({"context": 2}, ALL),  # the sequence is cut, the weights are not
    ({"context": 8}, ALL),
    ({"context": 2, "optimizer_weight_shard_size": 4}, PAIRS),
    ({"context": 8, "optimizer_weight_shard_size": 4}, PAIRS),
    ({"tensor": 2, "context": 2}, "4 copies of every shard: [0, 2, 4, 6] [1, 3, 5, 7]"),
    ({"tensor": 2, "context": 4}, "4 copies of every shard: [0, 2, 4, 6] [1, 3, 5, 7]"),
    ({"tensor": 4, "context": 2}, PAIRS),
    (
        {"context": 2, "pipeline": 2},
        "4 copies of every shard: [0, 1, 2, 3] [4, 5, 6, 7]",
    ),
    (
        {"context": 2, "pipeline": 4},
        "2 copies of every shard: [0, 1] [2, 3] [4, 5] [6, 7]" + NODE.format("[0, 1]"),
    ),
    (
        {"tensor": 2, "context": 2, "pipeline": 2},
        "2 copies of every shard: [0, 2] [1, 3] [4, 6] [5, 7]",
    ),
    (
        {"context": 2, "pipeline": 2, "order": "tp-cp-ep-pp-dp"},
        "4 copies of every shard: [0, 1, 4, 5] [2, 3, 6, 7]",
    ),
    ({"kind": "hsdp", "replicas": 2, "context": 2}, PAIRS),
    ({"expert": 2}, "4 copies of every shard: [0, 2, 4, 6] [1, 3, 5, 7]"),
    ({"expert": 4}, PAIRS),
    ({"expert": 4, "optimizer_weight_shard_size": 4}, PAIRS),
    ({"kind": "hsdp", "replicas": 2, "expert": 4}, PAIRS),
    ({"expert": 2, "pipeline": 2}, "2 copies of every shard: [0, 2] [1, 3] [4, 6] [5, 7]"),
    ({"context": 2, "expert": 4}, PAIRS),
    ({"context": 4, "expert": 2}, "4 copies of every shard: [0, 2, 4, 6] [1, 3, 5, 7]"),
    ({"tensor": 2, "expert": 2}, PAIRS),
    ({"tensor": 2, "context": 2, "expert": 2}, PAIRS),
    ({"tensor": 4, "expert": 2, "expert_tensor": 1}, PAIRS),
    ({"tensor": 2, "expert": 4, "expert_tensor": 1}, PAIRS),
]
IMPOSSIBLE: list[tuple[Sizes, str]] = [
    ({"kind": "fsdp2", "context": 2}, "data_parallel x context_parallel /"),
    (
        {"context": 2, "optimizer_weight_shard_size": 8},
        "data_parallel x context_parallel / optimizer_weight_shard_size = 4 x 2 / 8 = 1",
    ),
    ({"tensor": 2, "context": 2, "optimizer_weight_shard_size": 4}, "= 2 x 2 / 4 = 1, needs >= 2"),
    ({"tensor": 4, "pipeline": 2}, "data_parallel / optimizer_weight_shard_size = 1 / 1 = 1"),
    (
        {"expert": 8},
        "ranks / (tensor x expert x pipeline) = 8 / (1 x 8 x 1) = 1, in 1 shards: 1 copies",
    ),
    ({"context": 2, "expert": 8}, "= 8 / (1 x 8 x 1) = 1, in 1 shards: 1 copies, needs >= 2"),
    ({"expert": 4, "pipeline": 2}, "= 8 / (1 x 4 x 2) = 1, in 1 shards: 1 copies, needs >= 2"),
    ({"tensor": 2, "expert": 4}, "= 8 / (2 x 4 x 1) = 1, in 1 shards: 1 copies, needs >= 2"),
    ({"expert": 4, "optimizer_weight_shard_size": 8}, "= 8 / 8 = 1, needs >= 2"),
    ({"kind": "fsdp2", "expert": 2}, "= 8 / 8 = 1, needs >= 2"),
]
# On three nodes.
APART: tuple[Sizes, str] = (
    {"tensor": 2, "expert": 3, "expert_tensor": 1},
    "3 copies of the dense parameters and 2 of the experts, but no rank has both of another rank",
)
FEW = {"nodes": 3, "slots_per_node": 2}


def name_of(row: object) -> str:
    return " ".join(f"{k}={v}" for k, v in row.items()) if isinstance(row, dict) else ""


@pytest.fixture
def job_file(tmp_path) -> Callable[..., Path]:
    """Writes the file of a job with these sizes, of a program of one's own."""
    (tmp_path / "mine.py").write_text("def main(session): ...\n", encoding="utf-8")
    (tmp_path / "corpus.txt").write_text("words " * 100, encoding="utf-8")

    def write(sizes: Sizes, *, is_command: bool = False, **sections: Any) -> Path:
        program = {"command": ["true"]} if is_command else {"recipe": "mine:main"}
        document = {
            "worker": {**program, "cwd": str(tmp_path)},
            "parallelism": dict(sizes),
            "engine": {"nodes": 4, "slots_per_node": 2},
            "batch": {"global_batch_size": 48},
            "preflight": {"nodes": False},
            "steps": 1000,
            **sections,
        }
        if not is_command:
            document["data"] = {"sources": [str(tmp_path / "corpus.txt")]}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job_document(tmp_path, **document)), encoding="utf-8")
        return path

    return write


def said_of(path: Path) -> tuple[str, str, Mapping[str, Any]]:
    """What preflight says of the replacing of a process, and its check of the replicas."""
    document = json.loads(perdure("preflight", path, "--json"))
    lines = [*document["recovery"], *document["warnings"]]
    (line,) = [one for one in lines if one.startswith("process_replace: ")]
    (check,) = [one for one in document["checks"] if one["name"] == "replicas"]
    kind = "warning" if line in document["warnings"] else "note"
    return line.removeprefix("process_replace: "), kind, check


def replaced_in(path: Path) -> tuple[set[str], dict[str, str]]:
    """Classes that the ladder answers by it, and why it never does so for the others."""
    faults = json.loads(perdure("ladder", "--job", path, "--json"))["faults"]
    rung = Rung.PROCESS_REPLACE
    taken = {one["fault_class"] for one in faults if rung in [a["rung"] for a in one["answers"]]}
    never = {one["fault_class"]: one["never"][rung] for one in faults if rung in one["never"]}
    return taken, never


@pytest.mark.parametrize(("sizes", "copies"), POSSIBLE, ids=name_of)
def test_where_every_shard_is_on_two_ranks_a_process_is_replaced(job_file, sizes, copies):
    path = job_file(sizes)
    line, kind, check = said_of(path)
    assert (line, kind) == (f"possible, {copies}", "note")
    groups = copies.partition(";")[0]
    assert (check["outcome"], check["seen"]) == ("ok", groups)
    taken, never = replaced_in(path)
    assert "native_crash" in taken
    assert not [why for why in never.values() if "replica" in why]


@pytest.mark.parametrize(("sizes", "why"), [*IMPOSSIBLE, APART], ids=name_of)
def test_where_a_shard_is_on_one_rank_alone_no_process_is_replaced_and_the_reason_is_said(
    job_file, sizes, why
):
    engine = {"engine": FEW} if sizes is APART[0] else {}
    path = job_file(sizes, **engine)
    line, kind, check = said_of(path)
    assert line.startswith("not possible: ")
    assert (why in line, kind) == (True, "note"), line
    assert check["outcome"] == "warning"
    assert check["seen"].startswith("one copy of every shard")
    taken, never = replaced_in(path)
    assert taken == set()
    of_ladder = f"no replica: {line.removeprefix('not possible: ')}"
    assert never.keys() >= {"native_crash"}
    assert never["native_crash"] == of_ladder
    asked = job_file(sizes, restart={"process_replace": True}, **engine)
    assert said_of(asked)[1] == "warning"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [(sizes, f"allows: {copies}") for sizes, copies in POSSIBLE]
    + [(sizes, "does not allow: ") for sizes, _ in IMPOSSIBLE],
    ids=name_of,
)
def test_of_a_command_the_sizes_say_what_its_own_recovery_may_do_and_the_ladder_replaces_nothing(
    job_file, sizes, words
):
    path = job_file(sizes, is_command=True)
    line, _, _ = said_of(path)
    assert line.startswith("not possible: worker.command is not part of the recovery")
    assert f"; a recovery of its own (MindIO TFT) its layout {words}" in line
    taken, never = replaced_in(path)
    assert taken == set()
    assert never["native_crash"]


def test_every_class_that_a_replacement_answers_has_it_only_with_replicas(job_file):
    on_ladder = {str(one) for one, rungs in LADDER.items() if Rung.PROCESS_REPLACE in rungs}
    taken, never = replaced_in(job_file({"context": 2, "expert": 4}))
    assert taken
    without, reasons = replaced_in(job_file({"context": 2, "expert": 8}))
    assert without == set()
    assert taken <= {one for one, why in reasons.items() if why.startswith("no replica: ")}
    assert taken | never.keys() <= on_ladder
