"""The reasons that programs state for their ends."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.stated_end import EndReason, choose_stated_end, find_stated_end

STEPS = "".join(f"step {at}/6000 loss 2.1\n" for at in range(100, 110))
MORE = "".join(f"step {at}/6000 loss 2.1\n" for at in range(110, 200))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[exiting program after receiving SIGTERM.] datetime: 2025-01-01 00:00:00", "signal"),
        ("SIGTERM received: checkpoint saved, training stops", "signal"),
        ("rank_zero_info: Received SIGTERM: 15", "signal"),
        ("Caught signal 15, saving and exiting", "signal"),
        ("WARNING got SIGUSR1 from the scheduler, will stop after this step", "signal"),
        ("Signal 15 received, shutting down", "signal"),
        ("SIGTERM handler called at step 109", "signal"),
        ("Preemption notice received, checkpointing", "signal"),
        ("the instance was preempted", "signal"),
        ("[2025-01-01 00:00:00] SIGUSR1: requeue requested, checkpointing", "signal"),
        ("Handling auto-requeue signal: 10", "signal"),
        ("Termination requested, finishing the step", "signal"),
        ("KeyboardInterrupt caught, saving the model", "signal"),
        ("Interrupted (signal 15); saved at step 109", "signal"),
        ("Received stop signal from the scheduler", "signal"),
        ("the node is being drained; checkpoint saved", "signal"),
        ("\u6536\u5230SIGTERM\u4fe1\u53f7", "signal"),
        ("\u6355\u83b7\u5230\u4fe1\u53f7 15", "signal"),
        ("[exiting program after 690.0 minutes] datetime: 2025-01-01 00:00:00", "limit"),
        ("[exiting program at iteration 150] datetime: 2025-01-01 00:00:00", "limit"),
        ("Time limit reached after 11:58:00, stopping", "limit"),
        ("Walltime almost exhausted, exiting", "limit"),
        ("Approaching the job time limit, saving", "limit"),
        ("Not enough time left for another epoch", "limit"),
        ("max_runtime of 4h exceeded", "limit"),
        ("reached max training time (12h), stopping", "limit"),
        ("Job has timed out. Ran 60 minutes out of requested 60 minutes.", "limit"),
        ("`Trainer.fit` stopped: `max_time=00:12:00:00` reached.", "limit"),
        ("Epoch 00008: early stopping", "goal"),
        ("Early stopping triggered after 12 evaluations", "goal"),
        (("Monitored metric val_loss did not improve in the last 3 records. Best score: 0.5. "
         "Signaling Trainer to stop."), "goal"),
        ("Target loss 2.0 reached, stopping", "goal"),
        ("reached the target accuracy 0.75 in 12 epochs", "goal"),
        ("patience of 5 exhausted", "goal"),
        ("early stop since valid performance hasn't improved for last 5 runs", "goal"),
        ("Validation loss has plateaued, ending training", "goal"),
        ("Convergence criterion satisfied", "goal"),
        ("Stopping training due to lr: 1e-09 <= stop_min_lr: 1e-08", "goal"),
        ("Stopping. Best iteration: 96", "goal"),
        ("\u89e6\u53d1\u65e9\u505c", "goal"),
        ("`Trainer.fit` stopped: `max_steps=150` reached.", "goal"),
        (("There seems not to be a single sample in your epoch_iterator, stopping training at step "
         "20! This is expected if you're using an IterableDataset"), "no_sample"),
        (("There seems to be not a single sample in your epoch_iterator, stopping training at step "
         "20!"), "no_sample"),
        ("the data stream is exhausted", "no_sample"),
        ("no more samples left, leaving", "no_sample"),
        ("ran out of data at step 20", "no_sample"),
        ("Dataloader exhausted at step 109", "no_sample"),
        ("No more data.", "no_sample"),
        ("end of dataset reached", "no_sample"),
        ("the dataset has been fully consumed", "no_sample"),
        ("\u6570\u636e\u5df2\u7528\u5b8c", "no_sample"),
    ],
)  # fmt: skip
def test_a_sentence_at_the_end_states_the_reason(line, reason):
    stated = find_stated_end(f"{STEPS}{line}\nsaving to /ckpt\n")
    assert stated is not None
    assert (stated.reason, stated.line) == (EndReason(reason), line[:200])
    assert find_stated_end(STEPS + line + "\n" + MORE) is None, "training went on"


@pytest.mark.parametrize(
    "line",
    [
        "registered a handler for SIGTERM",
        "will save when a SIGTERM is received",
        "waiting for SIGTERM to be received",
        "EarlyStopping counter: 2 out of 5",
        "early_stopping: True",
        "early stopping enabled with patience=3",
        "elapsed time per iteration (ms): 820.7",
        "the target loss is not reached yet",
        "the goal is 6000 steps",
        "validation loss plateaued, reducing the learning rate to 1e-05",
        "no more data workers than cores: 8",
        "end of data preparation, 3 shards",
        "the stream empty_cache took 3 ms",
        "max_time .......... 43200",
        "early stop patience 3",
        "exit_duration_in_mins ........................... None",
    ],
)
def test_what_a_program_announces_or_counts_states_no_reason(line):
    assert find_stated_end(f"{STEPS}{line}\n") is None


def test_each_stream_is_read_alone_and_a_signal_goes_before_another_reason():
    words, bars = "Early stopping triggered\n", STEPS + MORE
    assert find_stated_end(words + bars) is None
    stated = choose_stated_end([words, bars])
    assert stated is not None
    assert stated.reason is EndReason.GOAL
    signal = choose_stated_end([words, "SIGTERM received\n", bars])
    assert signal is not None
    assert signal.reason is EndReason.SIGNAL


def test_a_signal_counts_where_the_program_went_on_to_the_end_of_its_epoch():
    text = f"{STEPS}SIGTERM received, the epoch is completed first\n{MORE}"
    assert find_stated_end(text) is None
    stated = find_stated_end(text, is_short=True)
    assert stated is not None
    assert stated.reason is EndReason.SIGNAL
