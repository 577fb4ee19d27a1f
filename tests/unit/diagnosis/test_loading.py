"""Which ends of a command are those of a checkpoint that it could not load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.diagnosis.loading import Resumed, find_checkpoint_paths, judge_loading
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass, RecoverableBy

CHOSEN = "/out/ckpt-000040.bin"
RESUMED = Resumed(
    has_trained=True, has_stepped=False, path=CHOSEN, step=40, other_steps=frozenset({20, 30})
)


def fault(fault_class: FaultClass, evidence: str) -> Fault:
    traits = TRAITS[fault_class]
    return Fault(
        fault_class, 1.0, evidence, explanation=traits.meaning, action=traits.action,
        recoverable_by=traits.recoverable_by, user_fault=traits.user_fault,
    )  # fmt: skip


def traceback(message: str, function: str = "load") -> str:
    return (
        "step 41\nTraceback (most recent call last):\n"
        f'  File "/w/train.py", line 9, in {function}\n'
        f"    state = read(path)\n{message}\n"
    )


@pytest.mark.parametrize(
    ("fault_class", "message"),
    [
        (FaultClass.CHECKPOINT_CORRUPT, "_pickle.UnpicklingError: invalid load key, '\\x00'."),
        (FaultClass.USER_CODE_ERROR, "json.decoder.JSONDecodeError: Expecting value: line 1"),
        (FaultClass.UNKNOWN, "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80"),
        (FaultClass.UNKNOWN, "struct.error: unpack requires a buffer of 8 bytes"),
        (FaultClass.DATALOADER_ERROR, "EOFError: Ran out of input"),
        (FaultClass.LAUNCH_MISCONFIGURED, f"FileNotFoundError: No such file: '{CHOSEN}/rank-3'"),
    ],
)
def test_the_chosen_checkpoint_is_ruled_out_for_the_one_before(fault_class, message):
    judged = judge_loading(fault(fault_class, message), [traceback(message)], RESUMED)
    assert judged.fault_class is FaultClass.CHECKPOINT_CORRUPT
    assert judged.recoverable_by is RecoverableBy.RETRY
    assert not judged.user_fault
    assert CHOSEN in judged.explanation
    assert "from step 30" in judged.explanation


@pytest.mark.parametrize(
    ("fault_class", "message"),
    [
        (FaultClass.USER_CODE_ERROR, "RuntimeError: Error(s) in loading state_dict: size mismatch"),
        (FaultClass.STORAGE_ERROR, "OSError: [Errno 5] Input/output error: '/out/ckpt-000040.bin'"),
        (FaultClass.LAUNCH_MISCONFIGURED, "FileNotFoundError: No such file: '/data/corpus.bin'"),
        (FaultClass.DEVICE_OOM, "torch.OutOfMemoryError: NPU out of memory"),
    ],
)
def test_another_end_before_the_first_step_is_not_the_checkpoints(fault_class, message):
    before = fault(fault_class, message)
    assert judge_loading(before, [traceback(message)], RESUMED) == before


def test_a_first_life_and_one_that_trained_have_other_causes():
    message = f"FileNotFoundError: No such file: '{CHOSEN}/rank-3'"
    before = fault(FaultClass.LAUNCH_MISCONFIGURED, message)
    for resumed in (replace(RESUMED, has_stepped=True), Resumed(False, False)):
        assert judge_loading(before, [traceback(message)], resumed) == before


def test_a_torn_folder_that_the_program_finds_itself_is_no_wrong_setting():
    message = "FileNotFoundError: [Errno 2] No such file: '/out/checkpoint-40/trainer_state.json'"
    before = fault(FaultClass.LAUNCH_MISCONFIGURED, message)
    resumed = Resumed(has_trained=True, has_stepped=False)
    judged = judge_loading(before, [traceback(message)], resumed)
    assert judged.fault_class is FaultClass.CHECKPOINT_CORRUPT
    assert "/out/checkpoint-40" in judged.explanation
    assert judged.recoverable_by is RecoverableBy.USER_FIX, "Perdure has not chosen it"


@pytest.mark.parametrize("path", ["/out/step_40/model.pt", "out/step_40/rng", "step_40/model.pt"])
def test_a_program_that_asks_for_what_was_set_aside_keeps_its_name_elsewhere(path):
    message = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
    resumed = Resumed(
        has_trained=True, has_stepped=False, path="/out/step_30", step=30,
        other_steps=frozenset({20}), set_aside=("/out/step_35", "/out/step_40"),
    )  # fmt: skip
    before = fault(FaultClass.LAUNCH_MISCONFIGURED, message)
    judged = judge_loading(before, [traceback(message)], resumed)
    assert (judged.fault_class, judged.user_fault) == (FaultClass.CHECKPOINT_CORRUPT, True)
    assert judged.explanation.startswith("/out/step_40 was set aside")
    assert "/out/step_30" in judged.explanation
    assert "latest" in judged.action


def test_a_checkpoint_that_was_written_again_under_a_name_set_aside_is_ruled_out_like_any_other():
    message = "FileNotFoundError: [Errno 2] No such file or directory: '/out/step_40/model.pt'"
    resumed = Resumed(
        has_trained=True, has_stepped=False, path="/out/step_40", step=40,
        other_steps=frozenset({20}), set_aside=("/out/step_40",),
    )  # fmt: skip
    before = fault(FaultClass.LAUNCH_MISCONFIGURED, message)
    judged = judge_loading(before, [traceback(message)], resumed)
    assert (judged.recoverable_by, judged.user_fault) == (RecoverableBy.RETRY, False)
    assert "goes on from step 20" in judged.explanation


def test_a_launchers_traceback_behind_that_of_the_rank_hides_nothing():
    rank = traceback("EOFError: Ran out of input")
    prefixed = "".join(f"[rank0]: {line}\n" for line in rank.splitlines())
    launcher = traceback("torch.distributed.elastic.ChildFailedError: train.py FAILED", "main")
    before = fault(FaultClass.UNKNOWN, "ChildFailedError: train.py FAILED")
    judged = judge_loading(before, [prefixed + launcher], RESUMED)
    assert judged.fault_class is FaultClass.CHECKPOINT_CORRUPT
    assert judged.recoverable_by is RecoverableBy.RETRY


def test_other_damaged_data_rules_out_no_checkpoint():
    message = "safetensors_rust.SafetensorError: header too large: /models/base/model.safetensors"
    before = fault(FaultClass.CHECKPOINT_CORRUPT, message)
    judged = judge_loading(before, [traceback(message)], RESUMED)
    assert judged.recoverable_by is RecoverableBy.USER_FIX


@pytest.mark.parametrize(
    ("other_steps", "answer", "text"),
    [
        ((), RecoverableBy.RETRY, "goes on anew"),
        ((50, 60), RecoverableBy.USER_FIX, "cannot set it aside"),
    ],
)
def test_a_program_starts_anew_only_where_it_has_ever_saved_once(other_steps, answer, text):
    message = "EOFError: Ran out of input"
    only = replace(RESUMED, other_steps=frozenset(other_steps))
    judged = judge_loading(fault(FaultClass.CHECKPOINT_CORRUPT, message), [], only)
    assert judged.recoverable_by is answer
    assert text in judged.explanation


@pytest.mark.parametrize(
    ("text", "chosen", "paths"),
    [
        ("'/out/checkpoint-40/optimizer.pt'", None, ["/out/checkpoint-40"]),
        ("./out/iter_0000040/mp_rank_00/model_optim_rng.pt", None, ["./out/iter_0000040"]),
        ("out/ckpt-000040.bin: Ran out of input", "/w/out/ckpt-000040.bin",
         ["/w/out/ckpt-000040.bin"]),
        ("open(/data/run/epoch=0-step=40.ckpt)", None, ["/data/run/epoch=0-step=40.ckpt"]),
        ('File "/w/checkpoint-40/train.py", line 3', None, []),
        ("see https://pytorch.org/docs", None, []),
    ],
)  # fmt: skip
def test_a_checkpoint_is_named_by_any_path_in_it(text, chosen, paths):
    assert find_checkpoint_paths(text, chosen) == paths
