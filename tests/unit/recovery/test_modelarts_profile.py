"""What ModelArts' pages on fault recovery say, sentence by sentence, with a job that asks for it.

A row has a sentence, the annotations that it is about, what happens to the job (as logs, codes and
ends of processes, which the diagnosis reads), the rungs that answer, how many of job-retry-num they
use up, and the node that the last of them isolates. A recovery that is marked as failing is
answered once more: that is what it degrades to. Source: "Recovering a Training Job", "Restart Upon
Suspension" and "Unconditional Auto Restart" of the ModelArts user guide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from perdure.training.config.recovery import RestartSpec
from perdure.training.errors import InputError
from perdure.training.platforms.forms import read_platform
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import IN_PROCESS, Policy, Recovery, RestartCount, Rung
from tests.unit.recovery import diagnosed
from tests.unit.recovery.diagnosed import ALL, of_code, of_exit, of_log, silence

IN_PLACE, HANG = Rung.IN_PLACE_RESTART, Rung.HANG_RESTART
POD, ISOLATED = Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED
JOB, STOP = Rung.JOB_RESCHEDULE, Rung.STOP

RESTARTED = {"fault-tolerance/job-retry-num": "8"}
UNCONDITIONAL = RESTARTED | {"fault-tolerance/job-unconditional-retry": "true"}
SUSPENDED = RESTARTED | {"fault-tolerance/hang-retry": "true"}
PODS = RESTARTED | {"fault-tolerance/pod-retry-num": "1"}
EVERYTHING = UNCONDITIONAL | SUSPENDED | PODS
HINT, MINOR, MAJOR, CRITICAL = range(4)
ECC = "80E01801"  # a multi-bit error of the HBM: the page's example of what heals by itself
OTHER = "80C98008"
USERS = ("80C98002", "80CB8002")
SEGFAULT = -11
SUPPORTED = ALL - IN_PROCESS  # a command, as every job there is one


@dataclass(frozen=True)
class Event:
    """One fault, and how many of the recoveries that answer it fail, cheapest first."""

    fault: Callable[[], Fault]
    failing: int = 0
    after_h: float = 0.1
    progressed: bool = False


def chip(code: str = ECC, severity: int | None = None, node: str = "node-0") -> Callable[[], Fault]:
    return lambda: of_code(code, severity=severity, node=node)


def log(text: str) -> Callable[[], Fault]:
    return lambda: of_log(text)


def raised(last_line: str) -> Callable[[], Fault]:
    """An exception of the program's own file that is all its log has."""
    text = diagnosed.TYPE_ERROR.rpartition("TypeError")[0] + last_line
    return lambda: of_log(f"{text}\n")


def exits(code: int = 3, node: str = "node-1") -> Callable[[], Fault]:
    return lambda: of_exit(code, node=node)


def many(event: Event, times: int) -> tuple[Event, ...]:
    return (event,) * times


@dataclass(frozen=True)
class Row:
    """A sentence and what must come of it."""

    says: str
    annotations: dict[str, str]
    events: Sequence[Event]
    rungs: Sequence[Rung]
    uses: int
    isolates: str | None = None
    count: RestartCount = RestartCount.EVER


HUNG = Event(silence)
LOST = Event(diagnosed.lost_node)
HEALS = Event(chip(severity=MINOR))
ODD = Event(exits())

ROWS = [
    # In-place recovery
    Row("it answers chip faults that heal by themselves, as a multi-bit ECC error of the HBM does",
        RESTARTED, [Event(chip())], [IN_PLACE], 0),
    Row("a minor fault heals by itself", RESTARTED, [HEALS], [IN_PLACE], 0),
    Row("a major fault heals by itself",
        RESTARTED, [Event(chip(severity=MAJOR))], [IN_PLACE], 0),
    Row("a critical fault never heals by itself",
        RESTARTED, [Event(chip(severity=CRITICAL))], [ISOLATED], 1, "node-0"),
    Row("a hint needs no handling: what ended is answered as if there were none",
        UNCONDITIONAL, [Event(chip(severity=HINT))], [IN_PLACE], 0),
    Row("it does not use up the maximum number of restarts, however often it is made",
        RESTARTED, [replace(HEALS, progressed=True, after_h=25)] * 9, [IN_PLACE] * 9, 0),
    Row("needs no standby node, and none is taken", RESTARTED, [HEALS], [IN_PLACE], 0, None),
    Row("if the chip is still ill the node is isolated and the job rescheduled",
        RESTARTED, [replace(HEALS, failing=1)], [IN_PLACE, ISOLATED], 1, "node-0"),
    Row("if the chip is still ill its pod alone is rescheduled where that is enabled",
        PODS, [replace(HEALS, failing=1)], [IN_PLACE, POD], 1, "node-0"),
    Row("the same code of the same chip three times in a row within 24 h isolates the node",
        RESTARTED, many(replace(HEALS, progressed=True), 3), [IN_PLACE, IN_PLACE, ISOLATED], 1,
        "node-0"),
    Row("two of them within 24 h do not",
        RESTARTED, many(replace(HEALS, progressed=True, after_h=13), 3), [IN_PLACE] * 3, 0),
    Row("another code of the chip in between breaks the row",
        RESTARTED,
        [replace(HEALS, progressed=True), Event(chip(OTHER), progressed=True),
         *many(replace(HEALS, progressed=True), 2)],
        [IN_PLACE] * 4, 0),
    Row("another node's fault in between does not break the row of this chip",
        RESTARTED,
        [replace(HEALS, progressed=True), Event(chip(OTHER, node="node-3"), progressed=True),
         replace(HEALS, progressed=True), replace(HEALS, progressed=True)],
        [IN_PLACE, IN_PLACE, IN_PLACE, ISOLATED], 1, "node-0"),
    *(
        Row(f"{code} isolates no node, it only reschedules the third time",
            RESTARTED, many(Event(chip(code), progressed=True), 3), [IN_PLACE, IN_PLACE, JOB], 1)
        for code in USERS
    ),
    # Unconditional rescheduling of the job
    Row("any exit code but zero, in a row: our restarts in place come first, then the job moves",
        UNCONDITIONAL, many(ODD, 4), [IN_PLACE] * 3 + [JOB], 1),
    Row("three of them in a row at most: the fourth time the same problem comes the job fails",
        UNCONDITIONAL, many(ODD, 7), [IN_PLACE] * 3 + [JOB] * 3 + [STOP], 3),
    Row("a crash without a word is such a problem, and isolates nobody",
        UNCONDITIONAL, many(Event(exits(SEGFAULT)), 7), [IN_PLACE] * 3 + [JOB] * 3 + [STOP], 3),
    Row("so is a time-out of a collective",
        UNCONDITIONAL, many(Event(log(diagnosed.TIME_OUT)), 7),
        [IN_PLACE] * 3 + [JOB] * 3 + [STOP], 3),
    Row("an exception that no rule knows is such a problem",
        UNCONDITIONAL, many(Event(raised("SomethingNew: 42")), 7),
        [IN_PLACE] * 3 + [JOB] * 3 + [STOP], 3),
    Row("a time-out that names HCCL alone is tried again",
        RESTARTED, [Event(raised("RuntimeError: HCCL timeout"))], [IN_PLACE], 0),
    Row("an ECC error that is named alone heals in place",
        RESTARTED, [Event(raised("RuntimeError: ECC error"))], [IN_PLACE], 0),
    Row("an error of the AI core that is named alone is tried again",
        RESTARTED, [Event(raised("RuntimeError: aicore kernel error"))], [IN_PLACE], 0),
    Row("a device that is gone is isolated, however short the exception",
        RESTARTED, [Event(raised("RuntimeError: Device disconnected"))], [ISOLATED], 1, "node-1"),
    Row("a node at fault in between begins the three anew",
        UNCONDITIONAL, [*many(ODD, 6), LOST, ODD],
        [IN_PLACE] * 3 + [JOB] * 3 + [ISOLATED, JOB], 5),
    Row("without it only faults of the environment restart the job; ours in place come first",
        RESTARTED, many(ODD, 4), [IN_PLACE] * 3 + [STOP], 0),
    # Isolated rescheduling of the job
    Row("a node at fault is isolated before the job is rescheduled",
        RESTARTED, [LOST], [ISOLATED], 1, "node-1"),
    Row("it needs no unconditional restart, and neither does any chip fault that does not heal",
        RESTARTED, [Event(chip("80E18402"))], [ISOLATED], 1, "node-0"),
    Row("it needs a healthy standby node: without one nothing restarts the job",
        RESTARTED, [replace(LOST, failing=1)], [ISOLATED, STOP], 0),
    Row("without one the job goes back unconditionally where that is enabled",
        UNCONDITIONAL, [replace(LOST, failing=1)], [ISOLATED, JOB], 1),
    Row("each rescheduling uses up one of the maximum number of restarts",
        RESTARTED, many(LOST, 9), [ISOLATED] * 8 + [STOP], 8),
    Row("it counts for ever, whatever progress there was",
        RESTARTED, many(replace(LOST, progressed=True), 9), [ISOLATED] * 8 + [STOP], 8),
    Row("ours: a recovery that progress followed is free",
        RESTARTED, many(replace(LOST, progressed=True), 20), [ISOLATED] * 20, 0, "node-1",
        RestartCount.WITHOUT_PROGRESS),
    # Rescheduling of a pod
    Row("the pod of the node at fault alone is created anew, after the node was isolated",
        PODS, [LOST], [POD], 1, "node-1"),
    Row("a rescheduling of the pod that fails becomes one of the job",
        PODS, [replace(LOST, failing=1)], [POD, JOB], 1),
    Row("as often as pod-retry-num says, then the job is rescheduled",
        PODS, many(LOST, 2), [POD, ISOLATED], 2, "node-1"),
    # Restart upon suspension
    Row("a job that hangs is restarted in its containers, which uses up nothing",
        SUSPENDED, [HUNG], [HANG], 0),
    Row("three times in a row at most", SUSPENDED, many(HUNG, 4), [HANG] * 3 + [STOP], 0),
    Row("progress in between begins the three anew",
        SUSPENDED, many(replace(HUNG, progressed=True), 9), [HANG] * 9, 0),
    Row("without it nothing restarts a job that hangs", RESTARTED, [HUNG], [STOP], 0),
    # Automatic restart as a whole
    Row("without job-retry-num nothing restarts the job: a node is lost",
        {"fault-tolerance/job-unconditional-retry": "true"}, [LOST], [STOP], 0),
    Row("without job-retry-num nothing restarts the job: a chip would heal",
        {"fault-tolerance/job-unconditional-retry": "true"}, [HEALS], [STOP], 0),
    Row("ours: what is surely the program's stops at once, whatever is enabled",
        EVERYTHING, [Event(log(diagnosed.TYPE_ERROR))], [STOP], 0),
]  # fmt: skip


def policy_of(row: Row) -> Policy:
    spec = RestartSpec.model_validate({"from_platform": row.annotations, "count": row.count})
    return spec.policy(operator_retry=False)


def play(row: Row) -> tuple[list[Recovery], str | None]:
    """The recoveries that answer the events, and whom the last one isolates."""
    policy, history, now_s, isolated = policy_of(row), list[Recovery](), 0.0, None
    for event in row.events:
        now_s += event.after_h * 3600
        fault = replace(event.fault(), at_s=now_s)
        for number in range(event.failing + 1):
            answer = decide(fault, now_s=now_s, history=history, supported=SUPPORTED, policy=policy)
            failed = number < event.failing
            progressed = event.progressed and not failed
            history.append(Recovery(fault, answer.rung, progressed=progressed, failed=failed))
            isolated = answer.isolate
    return history, isolated


def used_up(row: Row, history: Sequence[Recovery]) -> int:
    """How many restarts of the job are gone: with one more than that it could still move."""
    asked = policy_of(row).model_copy(update={"unconditional": False, "pod_retries": 0})
    later = replace(diagnosed.lost_node("node-9"), at_s=1e9)
    for most in range(129):
        policy = asked.model_copy(update={"max_restarts": most + 1})
        past = [one for one in history if one.rung is not STOP and not one.failed]
        if decide(later, now_s=1e9, history=past, supported=SUPPORTED, policy=policy).rung != STOP:
            return most
    raise AssertionError("no number of restarts is enough")


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_sentence_about_recovery_on_modelarts_holds(row):
    history, isolated = play(row)
    assert [one.rung for one in history] == list(row.rungs)
    assert (used_up(row, history), isolated) == (row.uses, row.isolates)


def test_what_a_sentence_needs_is_refused_without_it():
    for name, text in {"hang-retry": "true", "pod-retry-num": "1"}.items():
        with pytest.raises(InputError, match="needs fault-tolerance/job-retry-num"):
            read_platform({f"fault-tolerance/{name}": text})
    for text in ("0", "129"):
        with pytest.raises(InputError, match="1 to 128"):
            read_platform({"fault-tolerance/job-retry-num": text})
