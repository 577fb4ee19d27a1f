"""Whose exception it is: the subsystem of the file that raised it, and the evidence before it."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.cause import LogSource, choose_cause
from perdure.training.diagnosis.exceptions import judge_exception
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.subsystems import Subsystem, find_raiser, find_subsystem
from perdure.training.recovery.faults import FaultClass
from tests.values import not_none

LIB = "/opt/env/lib/python3.11/site-packages"
OWN = "/work/train.py"


def traceback(*files: str, source: str = "run()") -> str:
    frames = "".join(f'  File "{file}", line 3, in f\n    {source}\n' for file in files)
    return f"Traceback (most recent call last):\n{frames}"


@pytest.mark.parametrize(
    ("path", "subsystem"),
    [
        (f"{LIB}/torch/serialization.py", Subsystem.CHECKPOINT),
        (f"{LIB}/torch/distributed/checkpoint/filesystem.py", Subsystem.CHECKPOINT),
        (f"{LIB}/deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py",
         Subsystem.CHECKPOINT),
        (f"{LIB}/s3fs/core.py", Subsystem.STORAGE),
        (f"{LIB}/obs/client.py", Subsystem.STORAGE),
        (f"{LIB}/datasets/builder.py", Subsystem.LOADER),
        (f"{LIB}/streaming/base/shared/prefix.py", Subsystem.LOADER),
        (f"{LIB}/mindspore/dataset/engine/iterators.py", Subsystem.LOADER),
        (f"{LIB}/torch/distributed/distributed_c10d.py", Subsystem.COLLECTIVE),
        (f"{LIB}/megatron/core/pipeline_parallel/p2p_communication.py", Subsystem.COLLECTIVE),
        (f"{LIB}/torch_npu/npu/utils.py", Subsystem.DEVICE),
        (f"{LIB}/torch/nn/modules/module.py", Subsystem.FRAMEWORK),
        ("/usr/lib/python3.11/multiprocessing/pool.py", Subsystem.PYTHON),
        ("C:\\env\\lib\\site-packages\\datasets\\load.py", Subsystem.LOADER),
        (f"{LIB}/wandb/sdk/run.py", Subsystem.LIBRARY),
        ("/home/me/project/datasets/corpus.py", Subsystem.USER),
        ("/home/me/streaming/train.py", Subsystem.USER),
        ("train.py", Subsystem.USER),
    ],
)  # fmt: skip
def test_a_file_belongs_to_the_subsystem_of_its_package(path, subsystem):
    assert find_subsystem(path) is subsystem


def test_the_language_itself_raises_for_its_caller():
    assert find_raiser([OWN, "/usr/lib/python3.11/json/decoder.py"]) is Subsystem.USER
    frames = [OWN, f"{LIB}/s3fs/core.py", "/usr/lib/python3.11/json/decoder.py"]
    assert find_raiser(frames) is Subsystem.STORAGE
    assert find_raiser([]) is None


NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: "


@pytest.mark.parametrize(
    ("line", "files", "fault_class"),
    [
        (f"{NO_FILE}'/tmp/settings.json'", [OWN], FaultClass.LAUNCH_MISCONFIGURED),
        (f"{NO_FILE}'/run/secrets/key'", [OWN], FaultClass.LAUNCH_MISCONFIGURED),
        (f"{NO_FILE}'corpus.lock'", [OWN], FaultClass.UNKNOWN),
        (f"{NO_FILE}'step_100.tmp' -> 'step_100'", [OWN], FaultClass.UNKNOWN),
        ("FileExistsError: [Errno 17] File exists: '/tmp/run/out'", [OWN], FaultClass.UNKNOWN),
        (f"{NO_FILE}'/tmp/wandb/x.json'", [OWN, f"{LIB}/wandb/sdk/run.py"], FaultClass.UNKNOWN),
        ("KeyError: 7", [OWN, f"{LIB}/torch/utils/data/dataloader.py"], FaultClass.UNKNOWN),
        ("ValueError: bad worker", [OWN, f"{LIB}/mindspore/dataset/engine/queue.py"],
         FaultClass.UNKNOWN),
        ("AssertionError: can only test a child process",
         [OWN, f"{LIB}/torch/utils/data/dataloader.py"], FaultClass.UNKNOWN),
        (f"{NO_FILE}'/dev/davinci3'", [OWN], FaultClass.UNKNOWN),
        (f"{NO_FILE}'/tmp/x/core.so'", [OWN, f"{LIB}/torch_npu/npu/utils.py"], FaultClass.UNKNOWN),
        (f"{NO_FILE}'/tmp/settings.json'", [], FaultClass.UNKNOWN),
        (f"{NO_FILE}'out/global_step20/rank_4.pt'", [OWN, f"{LIB}/torch/serialization.py"],
         FaultClass.CHECKPOINT_CORRUPT),
        (f"{NO_FILE}'/c/step-4/.metadata'", [OWN, f"{LIB}/torch/distributed/checkpoint/a.py"],
         FaultClass.CHECKPOINT_CORRUPT),
        (f"{NO_FILE}'base-model.bin'", [OWN, f"{LIB}/torch/serialization.py"],
         FaultClass.LAUNCH_MISCONFIGURED),
        ("ValueError: Reused local directory: ['/d']", [OWN, f"{LIB}/streaming/base/shared.py"],
         FaultClass.LEFTOVER),
        ("RuntimeError: cache is locked by /c/x.lock", [OWN, f"{LIB}/datasets/builder.py"],
         FaultClass.LEFTOVER),
        ("ValueError: stale file of rank 3", [OWN, f"{LIB}/webdataset/cache.py"],
         FaultClass.LEFTOVER),
        ("ValueError: stale file of rank 3", [OWN], FaultClass.USER_CODE_ERROR),
    ],
)  # fmt: skip
def test_an_exception_is_judged_by_who_raised_it(line, files, fault_class):
    context = traceback(*files) if files else ""
    assert not_none(judge_exception(line, context)).spec.fault_class is fault_class


AICORE = (
    "[ERROR] RUNTIME(42,python3):2026-01-05-09:04:01.000.100 [device_error_proc.cc:700]42 "
    "The error from device(chipId:3, dieId:0), serial number is 1, there is an aicore exception"
)
USERS = traceback(OWN) + "AttributeError: 'NoneType' object has no attribute 'item'\n"


def first_cause(text: str) -> FaultClass:
    source = LogSource("a", scan_text(text, year=2026).findings)
    return not_none(choose_cause([source], at_s=0.0)).fault.fault_class


@pytest.mark.parametrize(
    ("text", "fault_class"),
    [
        (f"{AICORE}\n{USERS}", FaultClass.OPERATOR_ERROR),
        (f"{USERS}{AICORE}\n", FaultClass.USER_CODE_ERROR),
        (f"{AICORE}\n2026-01-05 09:30:00 INFO loading\n{USERS}", FaultClass.USER_CODE_ERROR),
        (f"[INFO] {AICORE[8:]}\n{USERS}", FaultClass.USER_CODE_ERROR),
    ],
)
def test_an_exception_of_the_user_yields_to_a_device_that_failed_shortly_before(text, fault_class):
    assert first_cause(text) is fault_class
