# ruff: noqa: S108 paths of others
"""Things that are in the way of a start: which an output names, and what follows."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.obstacles import find_obstacles, judge_obstacles
from perdure.training.diagnosis.recognise import recognise
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass
from perdure.training.recovery.rungs import LADDER, Rung
from perdure.training.wire.agent_status import Obstacle, ObstacleKind
from tests.values import not_none

FILE, PORT, DEVICE = ObstacleKind.FILE, ObstacleKind.PORT, ObstacleKind.DEVICE
BIND = "OSError: [Errno 98] Address already in use"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FileExistsError: [Errno 17] File exists: '/dev/shm/index'", [(FILE, "/dev/shm/index")]),
        ("FileExistsError: [Errno 17] File exists: '/psm_1a2b'", [(FILE, "/dev/shm/psm_1a2b")]),
        ("ERROR: shm_open: File exists (/dev/shm/nccl-Ab12)", [(FILE, "/dev/shm/nccl-Ab12")]),
        ("pid file /run/trainer.pid already exists", [(FILE, "/run/trainer.pid")]),
        ("FileExistsError: [Errno 17] File exists: '/tmp/tok.lock'", [(FILE, "/tmp/tok.lock")]),
        (f'    server.bind("/tmp/loader.sock")\n{BIND}', [(FILE, "/tmp/loader.sock")]),
        (f'    server.bind(("127.0.0.1", 29_611))\n{BIND}', [(PORT, "29611")]),
        ("[W socket.cpp:4361] failed to bind to [::]:29500 (errno: 98 - Address already in use).",
         [(PORT, "29500")]),
        ("listen failed. port: 29500, code: -98, name: EADDRINUSE", [(PORT, "29500")]),
        ("RuntimeError: Initialize: open device 2 failed", [(DEVICE, "2")]),
        ("device busy: /dev/davinci3 is in use", [(DEVICE, "/dev/davinci3")]),
        ("FileExistsError: [Errno 17] File exists: 'train.lock'", [(FILE, "train.lock")]),
        ("train.pid exists: another instance is running", [(FILE, "train.pid")]),
        ("FileExistsError: [Errno 17] File exists: '/out/run-1'", []),
        ("step 40 loss 3.0 10:11:12", []),
    ],
)  # fmt: skip
def test_an_output_names_what_is_taken(text, found):
    assert find_obstacles(text) == found


@pytest.mark.parametrize(
    "line",
    [
        "FileExistsError: [Errno 17] File exists: '/dev/shm/index'",
        "FileExistsError: [Errno 17] File exists: '/psm_1a2b3c4d'",
        "RuntimeError: pid file /run/trainer.pid already exists",
        "Error: another instance of the server is already running",
    ],
)
def test_what_was_left_is_a_class_of_its_own_and_answered_by_a_new_container(line):
    finding = not_none(recognise(line, "Traceback (most recent call last):\n"))
    assert finding.fault_class is FaultClass.LEFTOVER
    assert LADDER[FaultClass.LEFTOVER] == (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE, Rung.STOP)


def test_an_object_of_shared_memory_is_known_by_who_opens_it():
    context = (
        'Traceback (most recent call last):\n  File "/usr/lib/python3.11/multiprocessing/'
        'shared_memory.py", line 104, in __init__\n    self._fd = _posixshmem.shm_open(\n'
    )
    line = "FileExistsError: [Errno 17] File exists: '/weights'"
    assert not_none(recognise(line, context)).fault_class is FaultClass.LEFTOVER
    other = not_none(recognise(line, 'Traceback (most recent call last):\n  File "/w/train.py", '))
    assert other.fault_class is not FaultClass.LEFTOVER, "a folder of the user's"


def fault(fault_class: FaultClass, evidence: str) -> Fault:
    return Fault(fault_class, 1.0, evidence, explanation=TRAITS[fault_class].meaning)


def port_of(holder: str) -> Obstacle:
    return Obstacle(kind=PORT, name="29500", text=f"port 29500 is held by {holder}")


def test_the_holder_of_a_port_is_named_and_a_second_life_is_not_the_users_fault():
    before = fault(FaultClass.COLLECTIVE_TIMEOUT, BIND)
    obstacles = [port_of("python3 remote.py (pid 7, user bob)")]
    first = judge_obstacles(before, obstacles, is_first=True)
    assert first.fault_class is FaultClass.COLLECTIVE_TIMEOUT
    assert "Port 29500 is held by python3 remote.py (pid 7, user bob)." in first.explanation
    later = judge_obstacles(before, obstacles, is_first=False)
    assert later.fault_class is FaultClass.LEFTOVER
    assert not later.user_fault


def test_the_holder_of_a_device_is_named_beside_the_class_of_the_fault():
    before = fault(FaultClass.DEVICE_LOST, "RuntimeError: open device 2 failed")
    held = Obstacle(kind=DEVICE, name="2", text="/dev/davinci2 is held by old.py (pid 9, user x)")
    judged = judge_obstacles(before, [held], is_first=False)
    assert judged.fault_class is FaultClass.DEVICE_LOST
    assert "/dev/davinci2 is held by old.py" in judged.explanation


def test_a_fault_about_something_else_is_left_alone():
    before = fault(FaultClass.USER_CODE_ERROR, "KeyError: 'loss'")
    assert judge_obstacles(before, [port_of("x (pid 7)")], is_first=False) == before


def test_a_socket_that_only_the_source_line_names_is_in_the_evidence():
    socket = Obstacle(kind=FILE, name="/tmp/a.sock", is_of_run=True, text="/tmp/a.sock is left")
    judged = judge_obstacles(fault(FaultClass.UNKNOWN, BIND), [socket], is_first=False)
    assert judged.fault_class is FaultClass.LEFTOVER
    assert find_obstacles(judged.evidence)[0] == (FILE, "/tmp/a.sock")
