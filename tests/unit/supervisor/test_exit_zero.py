"""What the watch of an attempt makes of commands that exit with 0."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.diagnosis.ending import NO_SAMPLE_CODE, UNSEEN_NOTE
from perdure.training.engines.base import Snapshot
from perdure.training.journal.history import replay
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.exit_zero import (
    NOTHING_SO_FAR,
    CommandExitCheck,
    RunSoFar,
    bad_end_of_session,
    good_end_text,
    is_done,
    shown_target,
    was_stopped,
)
from perdure.training.wire.agent_status import (
    AgentState,
    AgentStatus,
    LeftProcess,
    RankStatus,
    ShownStep,
    WorkerStatus,
)
from perdure.training.wire.logs import WorkerLog
from tests.unit.journal.histories import BEGINNING, over

CRASH = 'Traceback (most recent call last):\n  File "train.py", line 1\nTypeError: no\n'


def worker(rank: int = 0, **fields: Any) -> WorkerStatus:
    return WorkerStatus(rank=rank, local_rank=0, pid=1, **{"exit_code": 0, **fields})


TORCHRUN = LeftProcess(pid=8, name="torchrun train.py (pid 8)", trains=True)
TENSORBOARD = LeftProcess(pid=9, name="tensorboard (pid 9)", trains=False)


def snapshot(
    *workers: WorkerStatus,
    steps: tuple[int, ...] = (),
    state: AgentState = AgentState.ENDED,
    left: tuple[LeftProcess, ...] = (),
) -> Snapshot:
    """A node for each worker; the first one has ranks with heartbeats."""
    ranks = [RankStatus(rank=r, local_rank=r, pid=9, step=step) for r, step in enumerate(steps)]
    agents = {
        worker_.rank: AgentStatus(
            node=f"node-{worker_.rank}", member=worker_.rank, state=state, schedule_cnt=1,
            proc_start_cnt=1, placement=1, attempt=1, workers=(worker_,), is_command=True,
            ranks=tuple(ranks) if worker_ is workers[0] else (), left_running=left,
        )
        for worker_ in workers
    }  # fmt: skip
    return Snapshot(agents)


def judged(
    last: Snapshot,
    *,
    target: int | None = None,
    earlier: tuple[int, ...] = (),
    logs: dict[int, str] | None = None,
    is_last: bool = True,
) -> dict[int, str]:
    """What is found at the end, after these steps were seen."""
    ends = ends_after(last, target=target, earlier=earlier, logs=logs, is_last=is_last)
    return {rank: bad.text for rank, bad in ends.false_successes.items()}


def test_a_step_that_the_output_shows_counts_as_one_by_heartbeat():
    last = snapshot(worker())
    shown = {0: last.agents[0].model_copy(update={"shown": ShownStep(step=40, age_s=0.0)})}
    text = {0: "ended at 40 of 100 with exit code 0"}
    assert judged(Snapshot(shown), target=100) == text
    assert judged(Snapshot(shown), target=40) == {}


def ends_after(
    last: Snapshot,
    *,
    target: int | None = None,
    earlier: tuple[int, ...] = (),
    logs: dict[int, str] | None = None,
    is_last: bool = True,
    so_far: RunSoFar = NOTHING_SO_FAR,
) -> CommandExitCheck:
    ends = CommandExitCheck(target, so_far)
    for step in earlier:
        ends.note(snapshot(worker(exit_code=None), steps=(step,), state=AgentState.RUNNING))
    ends.note(last)
    texts = logs or {}
    texts_of = {r: [WorkerLog(rank=r, path="x", text=text)] for r, text in texts.items()}
    ends.judge(ends.unjudged(last), texts_of, is_last=is_last)
    assert ends.unjudged(last) == [], "each is judged once"
    return ends


def test_a_command_without_a_trace_of_failure_has_ended_well():
    assert judged(snapshot(worker())) == {}
    assert judged(snapshot(worker()), target=30) == {}, "nothing is known of its steps"
    assert judged(snapshot(worker(), steps=(7,))) == {}, "nor of its target"


@pytest.mark.parametrize(
    ("earlier", "last", "short"),
    [
        ((10, 20), 20, True),
        ((10, 20), 21, True),
        ((96, 98), 99, False),
        ((80, 90), 90, False),
        ((), 98, True),
        ((), 99, False),
        ((), 100, False),
    ],
    ids=["far", "one more at the end", "counted from 0", "every ten steps", "seen once", "near",
         "there"],
)  # fmt: skip
def test_heartbeats_show_that_a_command_is_short_of_the_target_of_its_job(earlier, last, short):
    texts = judged(snapshot(worker(), steps=(last, last - 1)), target=100, earlier=earlier)
    assert texts == ({0: f"ended at {last} of 100 with exit code 0"} if short else {})


def test_a_crash_counts_at_once_and_a_short_count_when_no_process_is_left():
    two = snapshot(worker(0), worker(1))
    assert judged(two, logs={1: CRASH}, is_last=False) == {1: "TypeError: no"}
    counted = {0: "", 1: " iteration 10/ 60 | lm loss: 1.0"}
    assert judged(two, logs=counted, is_last=False) == {}
    assert judged(two, logs=counted) == {1: "ended at iteration 10 of 60 with exit code 0"}
    assert judged(two, logs={0: " iteration 60/ 60 |", 1: " iteration 10/ 60 |"}) == {}


def test_a_node_with_processes_left_is_not_judged_yet():
    ends = CommandExitCheck()
    assert ends.unjudged(snapshot(worker(), state=AgentState.STOPPING)) == []
    assert ends.unjudged(snapshot(worker(exit_code=1))) == []


def test_what_a_command_prints_when_it_is_stopped_is_no_crash_and_no_completion():
    stopped = snapshot(worker(stopped_by_agent=True), steps=(7,))
    assert judged(stopped, target=30, logs={0: CRASH}) == {}
    assert was_stopped(stopped)
    assert not was_stopped(snapshot(worker()))


def test_a_script_that_ends_before_the_training_that_it_started_has_not_ended_well():
    ends = ends_after(snapshot(worker(), left=(TENSORBOARD, TORCHRUN)))
    assert ends.notes == []
    bad = ends.false_successes[0]
    assert bad.text == "exit code 0 while torchrun train.py (pid 8) was still running"
    assert bad.fault_class is FaultClass.LAUNCH_MISCONFIGURED
    assert "`wait`" in bad.action
    short = ends_after(snapshot(worker(), left=(TORCHRUN,)), logs={0: " iteration 10/ 60 |"})
    assert "still running" in short.false_successes[0].text, "it says more than the count"


def test_what_is_left_by_a_training_that_reached_its_end_or_does_not_train_is_a_warning():
    done = {0: " iteration 60/ 60 | lm loss: 1.0"}
    for left, name in ((TORCHRUN, "torchrun"), (TENSORBOARD, "tensorboard")):
        ends = ends_after(snapshot(worker(), left=(left,)), logs=done)
        assert ends.false_successes == {}
        (note,) = ends.notes
        assert note.startswith(name)
        assert note.endswith("was still running and has been ended with the container")


@pytest.mark.parametrize(
    ("text", "steps", "is_seen"),
    [
        ("", (), False),
        ("finished\nTraining completed\n", (), False),
        (" iteration 10/ 10 | lm loss: 1.0\n", (), True),
        ("{'loss': 0.5, 'epoch': 1.0}\n", (), True),
        ("finished\n", (7,), True),
    ],
)
def test_the_end_of_a_command_of_whose_training_nothing_was_seen_says_so(text, steps, is_seen):
    ends = ends_after(snapshot(worker(), steps=steps), logs={0: text})
    assert ends.false_successes == {}, "it may be what the command is for"
    assert ends.notes == ([] if is_seen else [UNSEEN_NOTE])
    said = good_end_text(None, ends.notes)
    assert said.startswith("the command has ended well")
    assert ("no training step was seen" in said) is not is_seen
    other = ends_after(snapshot(worker(0), worker(1)), logs={1: text}, is_last=False)
    assert other.notes == [], "other nodes may still show it"


def bar(step: int, total: int = 100) -> str:
    return f"\r{step:3d}%|##  | {step}/{total} [00:10<00:50,  4.00it/s]"


SIGNAL = "SIGTERM received: checkpoint saved, training stops\n"
EMPTY = "There seems not to be a single sample in your epoch_iterator, stopping training\n"


@pytest.mark.parametrize(
    ("text", "fault_class"),
    [
        (" iteration 58/ 600 |\n iteration 60/ 600 |\n[exiting program after receiving SIGTERM.]",
         FaultClass.PREEMPTED),
        (bar(59) + bar(60) + "\n" + SIGNAL, FaultClass.PREEMPTED),
        ("the loss is 2.1\n" + SIGNAL, FaultClass.PREEMPTED),
        (" iteration 599/ 600 |\n[exiting program after receiving SIGTERM.]", FaultClass.PREEMPTED),
        (bar(39) + bar(40), FaultClass.UNKNOWN),
        ("Epoch 3/10\nstep 100/100\n", FaultClass.UNKNOWN),
        (" iteration 140/ 6000 |\n iteration 150/ 6000 |\n[exiting program after 690 minutes]",
         FaultClass.LAUNCH_MISCONFIGURED),
    ],
    ids=["Megatron", "bar", "no count", "last step but one", "no word", "epochs", "its own limit"],
)  # fmt: skip
def test_an_exit_with_0_before_the_target_that_the_program_shows_is_no_success(text, fault_class):
    (bad,) = ends_after(snapshot(worker()), logs={0: text}).false_successes.values()
    assert bad.fault_class is fault_class


@pytest.mark.parametrize(
    "text",
    [
        bar(99) + bar(100) + "\n" + SIGNAL,
        " iteration 600/ 600 |\n[exiting program after receiving SIGTERM.]",
        "the loss is 2.1\n[exiting program after 690 minutes]",
        "the whole stream was read: no more data left\n",
    ],
    ids=["at the target", "at the target of Megatron", "no target", "a stream of no known length"],
)
def test_an_exit_with_0_at_the_target_or_without_one_is_a_success(text):
    assert ends_after(snapshot(worker()), logs={0: text}).false_successes == {}


@pytest.mark.parametrize(
    "words", ["Epoch 00004: early stopping", "Target loss 2.0 reached", "patience of 3 exhausted"]
)
def test_a_program_that_stops_by_a_rule_of_its_own_is_done_and_its_words_are_a_note(words):
    ends = ends_after(snapshot(worker()), logs={0: f"step 39/300\nstep 40/300\n{words}\n"})
    assert ends.false_successes == {}
    assert ends.notes == [f"ended at 40 of 300 by a rule of the program: {words}"]


@pytest.mark.parametrize("text", [EMPTY, "", bar(20)], ids=["words", "silence", "a bar resumed"])
@pytest.mark.parametrize("target", [None, 100], ids=["the target as shown", "the job's"])
def test_a_resume_without_a_sample_falls_short_of_the_target_of_the_run(text, target):
    so_far = RunSoFar(target=100, step=35)
    ends = ends_after(snapshot(worker()), target=target, logs={0: text}, so_far=so_far)
    (bad,) = ends.false_successes.values()
    assert (bad.fault_class, bad.code) == (FaultClass.UNKNOWN, NO_SAMPLE_CODE)
    assert " of 100 without a step" in bad.text


def test_a_resume_after_the_last_step_has_nothing_left_to_do():
    so_far = RunSoFar(target=100, step=100)
    assert ends_after(snapshot(worker()), so_far=so_far).false_successes == {}
    later = ends_after(snapshot(worker()), logs={0: bar(89) + bar(90)}, so_far=so_far)
    assert later.false_successes[0].text == "ended at 90 of 100 with exit code 0", "it trained anew"


def test_the_target_of_the_job_goes_before_the_one_that_the_program_shows():
    counted = {0: " iteration 149/ 6000 |\n iteration 150/ 6000 |"}
    assert ends_after(snapshot(worker()), target=150, logs=counted).false_successes == {}
    (bad,) = ends_after(snapshot(worker()), target=300, logs=counted).false_successes.values()
    assert bad.text == "ended at iteration 150 of 300 with exit code 0"
    epoch = {0: bar(50, 50)}
    assert ends_after(snapshot(worker()), target=300, logs=epoch).false_successes == {}, (
        "an epoch's"
    )


def printed(text: str) -> dict[int, list[WorkerLog]]:
    return {0: [WorkerLog(rank=0, path="x", text=text)]}


def test_a_program_that_counts_from_0_or_shows_every_tenth_step_is_done_whoever_got_a_signal():
    for text in (bar(98) + bar(99), "step 800/938\nstep 900/938\n"):
        assert ends_after(snapshot(worker()), logs={0: text + SIGNAL}).false_successes == {}


def test_the_target_of_an_attempt_is_kept_for_those_after_it():
    ends = CommandExitCheck()
    logs = {0: [WorkerLog(rank=0, path="x", text=bar(35))]}
    assert ends.target_shown(logs) == 100
    assert ends.proven_target(logs) is None, "a bar may be one of an epoch"
    assert ends.proven_target(printed(" iteration 60/ 60 |")) == 60
    assert ends.proven_target(printed(" iteration 3/ 60 |")) is None, "it may be that of an epoch"
    assert CommandExitCheck(30).proven_target(logs) == 30


def test_a_session_is_done_when_its_agent_has_nothing_to_say_against_it():
    assert is_done(worker())
    assert is_done(worker(exit_code=-6, phase="done")), "torch 2.13 aborts at exit"
    assert not is_done(worker(exit_code=-6, phase="step"))
    assert not is_done(worker(exit_code=None))
    assert bad_end_of_session(worker()) is None
    early = worker(ended_early=True, error="RecipeEndedEarly: at step 6 of 30")
    assert not is_done(early)
    bad = bad_end_of_session(early)
    assert bad is not None
    assert (bad.text, bad.fault_class) == (early.error, FaultClass.USER_CODE_ERROR)


def test_the_target_of_a_command_is_what_it_shows_now_or_showed_in_an_earlier_attempt():
    history = replay([*BEGINNING, over(shown_target=300)])
    silent = snapshot(worker())
    assert shown_target(history, None) == shown_target(history, silent) == 300
    status = silent.agents[0].model_copy(
        update={"shown": ShownStep(step=40, age_s=0.0, target=500)}
    )
    assert shown_target(history, Snapshot({0: status})) == 500
    assert shown_target(replay(BEGINNING), None) is None
