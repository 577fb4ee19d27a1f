"""What a command is started with again, by the checkpoints that nodes see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest

from perdure.storage.file_sets import put_set
from perdure.storage.local import LocalStore
from perdure.training.commands.checkpoint_store import Save, save_prefix
from perdure.training.commands.checkpoint_watch import answer_saved_query
from perdure.training.config.job import Job, parse_job
from perdure.training.engines.base import Snapshot
from perdure.training.errors import InputError
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.journal.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointRecorded,
    ResumeChosen,
)
from perdure.training.preflight.job import check_without_store
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.supervisor.starting import CheckpointFinder, ResumeChoice, Resumption
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent import SavedQuery
from perdure.training.wire.agent_status import AgentState, AgentStatus, SavedCheckpoint
from tests.jobs import job_document
from tests.values import not_none

CHECKPOINTS = {"kind": "nanogpt", "path": "/out"}


def job(**worker: Any) -> Job:
    return parse_job(job_document(worker={"command": ["true"], **worker}))


def saved(step: int, path: str = "/out/ckpt.pt") -> SavedCheckpoint:
    return SavedCheckpoint(step=step, path=path, size_bytes=1, written_s=10.0)


@dataclass
class Nodes:
    """What the agents answer."""

    answers: dict[str, tuple[SavedCheckpoint, ...]]
    asked: list[SavedQuery] = field(default_factory=list)

    def list_saved(self, query: SavedQuery) -> dict[str, tuple[SavedCheckpoint, ...]]:
        self.asked.append(query)
        return self.answers


def newest(nodes: Any, store: Any = None, **worker: Any) -> SavedCheckpoint | None:
    return (
        CheckpointFinder(job(**worker), nodes, store, RunHistory(), "/here", {"A": "b"})
        .choose()
        .saved
    )


def test_without_a_place_of_checkpoints_nobody_is_asked():
    nodes = Nodes({"node-0": (saved(10),)})
    assert newest(nodes) is None
    assert nodes.asked == []


def test_the_newest_checkpoint_of_all_nodes_is_taken():
    nodes = Nodes({"node-0": (saved(10), saved(20)), "node-1": (saved(30),), "node-2": ()})
    assert newest(nodes, checkpoints=CHECKPOINTS) == saved(30)
    assert (nodes.asked[0].cwd, nodes.asked[0].variables) == ("/here", {"A": "b"})


def test_with_uploads_the_newest_that_every_node_can_have_is_taken(tmp_path):
    store = LocalStore(tmp_path)
    (tmp_path / "step-20").write_bytes(b"weights")
    put_set(store, save_prefix("run", Save(20, (1, 1)), 1), tmp_path / "step-20", written_s=5.0)
    nodes = Nodes({"node-0": (saved(10), saved(30)), "node-1": (saved(10),)})
    with_uploads = {"checkpoints": {**CHECKPOINTS, "upload": True}}
    checkpoint = not_none(newest(nodes, store, **with_uploads))
    assert (checkpoint.step, checkpoint.path) == (20, str(tmp_path / "step-20")), (
        "node-1 lacks step 30"
    )
    nodes.answers["node-1"] = (saved(30),)
    assert newest(nodes, store, **with_uploads) == saved(30)


FIRST, SECOND = (1, 1), (1, 2)
IN_PARTS = {"kind": "megatron", "path": "/${PERDURE_NODE}/out", "upload": True}


class Parts:
    """What two nodes have, and what is stored of it."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "store")
        self.folder = folder
        self.on_nodes: dict[str, tuple[SavedCheckpoint, ...]] = {"node-0": (), "node-1": ()}

    def has(self, member: int, step: int, saved_in: tuple[int, int] = FIRST) -> Self:
        part = saved(step, f"/node-{member}/{step}")
        part_of_save = part.model_copy(update={"saved_in": saved_in, "member": member})
        self.on_nodes[f"node-{member}"] += (part_of_save,)
        return self

    def stores(
        self, member: int, step: int, saved_in: tuple[int, int] = FIRST, *, model: bool = True
    ) -> Self:
        path = self.folder / f"{member}-{step}-{saved_in}"
        file = path / "mp_rank_00" / ("model_optim_rng.pt" if model else "layer_wise_optimizer.pt")
        file.parent.mkdir(parents=True)
        file.write_bytes(b"weights")
        put_set(self.store, save_prefix("run", Save(step, saved_in), member), path, written_s=5.0)
        return self

    @property
    def newest(self) -> tuple[int, tuple[int, int] | None] | None:
        nodes = parse_job(
            job_document(worker={"command": ["true"], "checkpoints": IN_PARTS}, engine={"nodes": 2})
        )
        ask = CheckpointFinder(
            nodes,
            Nodes(self.on_nodes),  # type: ignore[arg-type]
            self.store,
            RunHistory(),
            "/",
            {},
        )
        checkpoint = ask.choose().saved
        return (checkpoint.step, checkpoint.saved_in) if checkpoint is not None else None


def test_every_member_needs_its_own_part(tmp_path):
    parts = Parts(tmp_path).has(0, 10).has(0, 20)
    assert parts.newest is None
    parts.stores(0, 10).stores(0, 20)
    assert parts.newest is None, "what one member stored is none of another's"
    assert parts.has(1, 10).newest == (10, FIRST)
    assert parts.stores(1, 20).newest == (20, FIRST)


def test_a_step_that_the_first_member_has_no_sign_of_is_not_complete(tmp_path):
    parts = Parts(tmp_path).has(0, 10).has(1, 10).has(1, 20).stores(1, 20)
    assert parts.newest == (10, FIRST)


def test_parts_of_different_attempts_do_not_belong_together(tmp_path):
    parts = Parts(tmp_path).stores(0, 10).stores(1, 10)
    parts.has(0, 20, FIRST).has(1, 20, SECOND)
    assert parts.newest == (10, FIRST)
    assert parts.stores(0, 20, SECOND).newest == (20, SECOND)


def test_a_part_whose_ranks_read_that_of_others_needs_all_of_them_stored(tmp_path):
    parts = Parts(tmp_path).has(0, 20).stores(1, 20, model=False)
    assert parts.newest is None, "the model's file is on one node alone"
    assert parts.stores(0, 20).newest == (20, FIRST)


def test_of_the_only_node_a_checkpoint_counts_that_is_not_stored_yet(tmp_path):
    worker = {"command": ["true"], "checkpoints": IN_PARTS}
    nodes = Nodes({"node-0": (saved(20),)})
    ask = CheckpointFinder(
        parse_job(job_document(worker=worker, engine={"nodes": 1})),
        nodes,  # type: ignore[arg-type]
        LocalStore(tmp_path),
        RunHistory(),
        "/",
        {},
    )
    assert ask.choose().saved == saved(20)
    assert not nodes.asked[0].is_in_parts


def test_a_command_without_a_checkpoint_is_started_as_it_was_first():
    spec = job(checkpoints=CHECKPOINTS, resume={"args": ["--resume"]})
    assert Resumption.of(spec, None).args == ()
    assert Resumption.of(spec, None).variables == ()


def test_a_command_with_one_gets_its_arguments_and_variables():
    at = "step ${PERDURE_CHECKPOINT_STEP}"
    resume = {"args": ["--from=${PERDURE_CHECKPOINT}"], "env": {"AT": at}}
    added = Resumption.of(job(checkpoints=CHECKPOINTS, resume=resume), saved(20))
    assert added.args == ("--from=${PERDURE_CHECKPOINT}",), "filled in on the node"
    assert dict(added.variables) == {
        "AT": "step 20", "PERDURE_CHECKPOINT": "/out/ckpt.pt", "PERDURE_CHECKPOINT_STEP": "20",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        ({"resume": {"args": ["-r"]}}, "resume needs checkpoints"),
        ({"checkpoints": CHECKPOINTS, "resume": {}}, "give args or env"),
        ({"checkpoints": {"kind": "glob", "path": "/out"}}, "has no *"),
        ({"checkpoints": {"kind": "deepspeed", "path": "/out"}}, "worker.checkpoints.kind"),
        (
            {"checkpoints": CHECKPOINTS, "resume": {"env": {"MA_A": "1"}}},
            "MA_A is set by the node agent",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(worker, why):
    with pytest.raises(InputError) as caught:
        job(**worker)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("worker", "field"),
    [
        ({"resume": {"args": ["${CHECKPIONT}"]}}, "worker.resume.args"),
        ({"checkpoints": {"kind": "nanogpt", "path": "${OUTT}"}}, "worker.checkpoints.path"),
    ],
)
def test_a_name_that_nothing_sets_is_refused_before_anything_starts(worker, field, tmp_path):
    spec = job(cwd=str(tmp_path), **{"checkpoints": CHECKPOINTS, **worker})
    with pytest.raises(InputError, match=field):
        check_without_store(spec)


def test_the_path_is_filled_in_with_the_jobs_variables(tmp_path: Path):
    (tmp_path / "out").mkdir()
    spec = job(checkpoints={"kind": "nanogpt", "path": "${OUT}"}).worker.checkpoints
    assert spec is not None
    query = SavedQuery(
        spec=spec, cwd=str(tmp_path), variables={}, run_id="run", since_s=0.0, until_s=0.0
    )
    assert "OUT" in str(answer_saved_query(query, "node-0", 0).error)
    query_with_out = query.model_copy(update={"variables": {"OUT": "out"}})
    assert answer_saved_query(query_with_out, "node-0", 0).saved == ()
    assert answer_saved_query(query_with_out, "node-0", 0).error is None


def test_uploads_from_several_nodes_of_which_one_has_the_sign_are_refused():
    spec = {"kind": "torchtitan", "path": "/o", "upload": True}
    worker = {"command": ["true"], "checkpoints": spec}
    with pytest.raises(InputError, match=r"kind=torchtitan is for one node, engine\.nodes=2"):
        parse_job(job_document(worker=worker, engine={"nodes": 2}))
    parse_job(job_document(worker=worker, engine={"nodes": 1}))


def test_uploads_that_cannot_work_are_refused():
    spec = {"kind": "megatron", "path": "/o", "upload": True}
    megatron = {"command": ["true"], "checkpoints": spec}
    with pytest.raises(InputError, match=r"is one folder, engine\.nodes=2.*PERDURE_NODE"):
        parse_job(job_document(worker=megatron, engine={"nodes": 2}))
    parse_job(job_document(worker=megatron, engine={"nodes": 1}))
    spec["path"] = "${HOME}/o"
    with pytest.raises(InputError, match="is one folder"):
        parse_job(job_document(worker=megatron, engine={"nodes": 2}))
    spec["path"] = "/o/${PERDURE_NODE}"
    parse_job(job_document(worker=megatron, engine={"nodes": 2}))
    with pytest.raises(InputError, match="upload needs one folder"):
        job(checkpoints={"kind": "glob", "path": "/o/*/step-*", "upload": True})


def test_what_nodes_say_that_they_have_saved_is_noted_once():
    status = AgentStatus(
        node="node-0", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, is_command=True, saved=(saved(10), saved(20)),
    )  # fmt: skip
    progress = Progress()
    progress.take_snapshot(Snapshot({0: status, 1: status}), at_s=1.0)
    assert [save.step for save in progress.saved] == [10, 20]
    assert progress.checkpoints == [10, 20]
    progress.take(())
    later = status.model_copy(update={"saved": (saved(20), saved(30))})
    progress.take_snapshot(Snapshot({0: later}), at_s=2.0)
    assert progress.checkpoints == [30]


def record(history: RunHistory, path: str, step: int, *, number: int, is_unreadable: bool) -> None:
    """Add an attempt that was given a checkpoint and died before its first step."""
    fault_class = FaultClass.CHECKPOINT_CORRUPT if is_unreadable else FaultClass.NATIVE_CRASH
    facts: dict[str, Any] = {"epoch": 1, "placement": 1, "attempt": number}
    history.attempts.append(
        AttemptView(
            AttemptStarted(at_s=50.0, from_step=0, **facts),
            (),
            resume=ResumeChosen(at_s=50.0, step=step, path=path, **facts),
            ended=AttemptEnded(
                at_s=60.0, outcome="failed", to_step=None, proc_start_cnt={}, duration_s=1.0,
                fault=Fault(fault_class, 60.0, "x"), **facts,
            ),
        )
    )  # fmt: skip


def choose(
    *saves: SavedCheckpoint, unreadable: Sequence[int], recorded: Sequence[int] = ()
) -> ResumeChoice:
    history = RunHistory()
    for number, step in enumerate(unreadable, 2):
        record(history, f"/out/{step}", step, number=number, is_unreadable=True)
    history.checkpoints = [
        CheckpointRecorded(at_s=1.0, epoch=1, placement=1, attempt=1, step=step)
        for step in recorded
    ]
    nodes: Any = Nodes({"node-0": saves})
    spec = job(checkpoints=CHECKPOINTS)
    return CheckpointFinder(spec, nodes, None, history, "/", {}).choose()  # type: ignore[arg-type]


def test_a_checkpoint_that_could_not_be_loaded_gives_way_to_the_one_before():
    choice = choose(saved(30, "/out/30"), saved(40, "/out/40"), unreadable=[40], recorded=[30, 40])
    assert not_none(choice.saved).step == 30
    assert [(c.path, c.why) for c in choice.set_aside] == [
        ("/out/40", "attempt 1.2 could not load it")
    ]


def test_several_are_ruled_out_one_after_the_other():
    saves = [saved(step, f"/out/{step}") for step in (20, 30, 40)]
    choice = choose(*saves, unreadable=[40, 30], recorded=[20, 30, 40])
    assert not_none(choice.saved).step == 20
    assert [c.path for c in choice.set_aside] == ["/out/40", "/out/30"]


def test_the_same_step_saved_later_is_another_checkpoint():
    again = saved(40, "/out/40").model_copy(update={"written_s": 100.0})
    choice = choose(saved(30, "/out/30"), again, unreadable=[40], recorded=[30, 40])
    assert choice == ResumeChoice(again)


def test_another_end_before_the_first_step_rules_nothing_out():
    history = RunHistory()
    record(history, "/out/40", 40, number=2, is_unreadable=False)
    nodes: Any = Nodes({"node-0": (saved(40, "/out/40"),)})
    finder = CheckpointFinder(job(checkpoints=CHECKPOINTS), nodes, None, history, "/", {})  # type: ignore[arg-type]
    assert finder.choose() == ResumeChoice(saved(40, "/out/40"))


def test_a_run_whose_only_checkpoint_cannot_be_loaded_starts_anew():
    choice = choose(saved(40, "/out/40"), unreadable=[40], recorded=[40])
    assert choice.saved is None
    assert [c.path for c in choice.set_aside] == ["/out/40"]


def test_a_run_that_has_trained_for_long_does_not_start_anew():
    choice = choose(saved(40, "/out/40"), unreadable=[40], recorded=[10, 20, 30, 40])
    assert choice == ResumeChoice(saved(40, "/out/40"))


def test_what_was_cut_short_is_set_aside_and_never_chosen():
    torn = saved(40, "/out/40").model_copy(update={"is_whole": False})
    choice = choose(saved(20, "/out/20"), torn, unreadable=[])
    assert not_none(choice.saved).step == 20
    assert [(c.path, c.why) for c in choice.set_aside] == [("/out/40", "its save was cut short")]
    assert choose(torn, unreadable=[]).saved is None


def test_a_save_that_another_node_sees_whole_is_not_torn():
    seen_late = saved(40, "/out/40").model_copy(update={"is_whole": False})
    nodes: Any = Nodes({"node-0": (saved(40, "/out/40"),), "node-1": (seen_late,)})
    spec = job(checkpoints=CHECKPOINTS)
    finder = CheckpointFinder(spec, nodes, None, RunHistory(), "/", {})  # type: ignore[arg-type]
    assert finder.choose() == ResumeChoice(saved(40, "/out/40"))


def test_only_a_lost_node_leaves_it_open_whether_something_is_still_written():
    for fault_class, is_over in ((FaultClass.NATIVE_CRASH, True), (FaultClass.NODE_LOST, False)):
        history = RunHistory()
        record(history, "/out/40", 40, number=1, is_unreadable=False)
        (view,) = history.attempts
        ended = not_none(view.ended).model_copy(update={"fault": Fault(fault_class, 55.0, "x")})
        history.attempts = [replace(view, ended=ended)]
        nodes = Nodes({"node-0": ()})
        spec = parse_job(
            job_document(
                worker={"command": ["true"], "checkpoints": CHECKPOINTS},
                engine={"kind": "kubernetes", "image": "registry/image:1"},
            )
        )
        CheckpointFinder(spec, nodes, None, history, "/", {}).choose()  # type: ignore[arg-type]
        assert nodes.asked[0].is_over is is_over
        assert nodes.asked[0].until_s == (60.0 if is_over else 55.0)
