"""Job files of people who mean harm, or typed too fast: a job, or one line with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli import main
from perdure.training.config.job_file import MAX_FILE_BYTES, load_job
from perdure.training.errors import InputError

COMMAND = """\
run_id: hostile
storage: {address: "file:///tmp/hostile"}
worker: {command: [python, train.py]}
"""
SESSION = """\
run_id: hostile
storage: {address: "file:///tmp/hostile"}
data: {sources: [/tmp/corpus]}
steps: 300
"""
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

REFUSED = [
    # Numbers that are none.
    ("steps: true", "steps: true and false are no numbers"),
    ("steps: yes", "steps: true and false are no numbers"),
    ("steps: 1:30", 'steps: "1:30"'),
    ("steps: 0x10", 'steps: "0x10"'),
    ("steps: 3.5", "steps: 3.5"),
    ("steps: 2026-11-27", "steps: "),
    ("steps: ''", 'steps: ""'),
    ("steps: []", "steps: []"),
    ("seed: off", "seed: true and false are no numbers"),
    ("engine: {nodes: on}", "engine.nodes: true and false are no numbers"),
    ("engine: {nodes: 1:00}", 'engine.nodes: "1:00"'),
    ("optimizer: {betas: [true, 0.9]}", "optimizer.betas: true and false are no numbers"),
    ("worker: {command: [a], progress: {patterns: ['(?P<step>\\d)'], counts_from: true}}", "twice"),
    # Numbers that are not finite.
    ("restart: {start_timeout_s: nan}", 'restart.start_timeout_s: "nan"'),
    ("restart: {start_timeout_s: .nan}", "restart.start_timeout_s: nan is not finite"),
    ("restart: {start_timeout_s: .inf}", "restart.start_timeout_s: inf is not finite"),
    ("restart: {hang_timeout_s: -.inf}", "restart.hang_timeout_s: -inf is not finite"),
    ("restart: {start_timeout_s: 1e400}", "restart.start_timeout_s: inf is not finite"),
    ("restart: {start_timeout_s: '1e400'}", "restart.start_timeout_s: "),
    ("restart: {start_timeout_s: Infinity}", "restart.start_timeout_s: "),
    ("peak_tflops: 1.0e+999", "peak_tflops: inf is not finite"),
    ("optimizer: {lr: nan}", "optimizer.lr: "),
    ("optimizer: {betas: [0.9, .nan]}", "optimizer.betas.1: nan is not finite"),
    ("storage2: .nan", "storage2: nan is not finite"),
    # Numbers that are too large.
    ("steps: 1" + "0" * 400, "steps: a number of more than 400 digits is too much"),
    ("steps: 1" + "0" * 5000, "holds a date or number that there is not"),
    ("seed: 1" + "0" * 400, "seed: "),
    ("model: {hidden_size: 99999999999999999999}", "model.hidden_size: 99999999999999999999 is"),
    ("comm: {timeout_s: 1e12}", "comm.timeout_s: 1000000000000.0 is too much: at most"),
    ("engine: {orphan_timeout_s: 1e300}", "engine.orphan_timeout_s: 1e+300 is too much"),
    ("watch: {log_limit_bytes: 1" + "0" * 30 + "}", "watch.log_limit_bytes: 1"),
    ("batch: {global_batch_size: 1" + "0" * 25 + "}", "batch.global_batch_size: 1"),
    # Texts that are none.
    ("worker: {cwd: off}", "twice"),
    ("log_path: no", "log_path: false"),
    ("log_path: on", "log_path: true"),
    ("env: {A: yes}", "env.A: must be a text, in quotes"),
    ("env: {A: 1}", "env.A: must be a text, in quotes"),
    ("env: {on: a}", "env"),
    ('log_path: "a\\0b"', "log_path: holds a zero byte"),
    # Variables.
    ("env: {'A=B': c}", "env: a name is that of no variable"),
    ("env: {'': c}", "env: a name is that of no variable"),
    ("env: {1A: c}", "env: a name is that of no variable"),
    ("env: {'A B': c}", "env: a name is that of no variable"),
    ('env: {"A\\nB": c}', "env: a name is that of no variable"),
    ('env: {"A\\0": c}', "env"),
    ('env: {A: "b\\0c"}', "env.A: holds a zero byte"),
    ("env: {A: " + "x" * 200_000 + "}", "env: A has more than 131071 bytes, which no process gets"),
    ("env_from: {'A=B': {secret: C}}", "env_from: a name is that of no variable"),
    # Documents that multiply, or have no end.
    ("env: &a {x: *a}", "an alias contains itself, line 4"),
    ("env: &a [*a]", "an alias contains itself, line 4"),
    ("x: &x {y: &y {z: *x}}", "an alias contains itself"),
    (BOMB, "more than 100000 values, its aliases included"),
    (MERGES, "more than 100000 values, its aliases included"),
    ("x: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
    ("x: " + "[" * 5000, "nested too deeply"),
    ("x: " + "{a: " * 60 + "1" + "}" * 60, "nested more than 50 deep"),
    ("# " + "x" * MAX_FILE_BYTES, f"has more than {MAX_FILE_BYTES} bytes"),
    ('"a\\eb": 1', "a\\x1bb: no such field"),
    ('"a\\nb": 1', "a b: no such field"),
    ("x" * 500 + ": 1", "x" * 80 + ": no such field"),
    ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ("x: !!python/name:os.system", "is not YAML"),
    # Intervals.
    ("watch: {low_for_s: 5}", "watch.low_for_s: 5 is less than watch.sample_every_s=10"),
    ("watch: {command_quiet_s: 1}", "watch.command_quiet_s: 1 is less than"),
    ("checkpoint: {mtbf_s: 60, every_s: 600}", "checkpoint.mtbf_s: 60 is less than"),
    ("engine: {orphan_timeout_s: 30, grace_s: 60}", "engine.orphan_timeout_s: 30 is less than"),
]  # fmt: skip
REFUSED_SESSIONS = [
    ("optimizer: {warmup_steps: 301}", "optimizer.warmup_steps=301 must not exceed steps=300"),
    ("drill: {faults: [{kind: kill, rank: 9, step: 3}]}", "drill.faults.0.rank: 9 is none"),
    ("drill: {faults: [{kind: kill, rank: 0, step: 301}]}", "drill.faults.0.step: 301 is after"),
]


def refusal(path: Path, text: str) -> str:
    """The line that refuses a job file."""
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_job(path)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 400 + len(str(path))
    return line


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=lambda text: text[:40])
def test_a_job_file_that_cannot_be_is_refused_on_one_line(tmp_path, text, words):
    assert words in refusal(tmp_path / "job.yaml", f"{COMMAND}{text}\n")


@pytest.mark.parametrize(("text", "words"), REFUSED_SESSIONS, ids=lambda text: text[:40])
def test_what_comes_after_the_last_step_contradicts_the_run(tmp_path, text, words):
    assert words in refusal(tmp_path / "job.yaml", f"{SESSION}{text}\n")


@pytest.mark.parametrize(("text", "words"), REFUSED[::12], ids=lambda text: text[:40])
def test_a_command_refuses_it_with_exit_code_2_and_that_line(tmp_path, capsys, text, words):
    path = tmp_path / "job.yaml"
    line = refusal(path, f"{COMMAND}{text}\n")
    with pytest.raises(SystemExit) as ended:
        main(["show", str(path)])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err) == (2, "", f"perdure: {line}\n")
    assert words in line


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("steps: 300", "steps", 300),
        ("steps: 1_000", "steps", 1000),
        ("steps: 1e3", "steps", 1000),
        ("steps: '300'", "steps", 300),
        ("seed: 010", "seed", 10),
        ("peak_tflops: 3e-4", "peak_tflops", 3e-4),
        ("peak_tflops: .5", "peak_tflops", 0.5),
        ("peak_tflops: 2", "peak_tflops", 2.0),
        ('env: {A: "b\\nc=d"}', "env", {"A": "b\nc=d"}),
        ("env: {A: 'yes'}", "env", {"A": "yes"}),
        ("log_path: /a/1:30", "log_path", "/a/1:30"),
    ],
)  # fmt: skip
def test_what_is_meant_is_read(tmp_path, text, field, value):
    path = tmp_path / "job.yaml"
    path.write_text(f"{COMMAND}{text}\n")
    assert getattr(load_job(path), field) == value


def test_a_switch_is_still_one_in_every_spelling(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(f"{COMMAND}restart: {{hang: off, in_place: yes, unconditional: false}}\n")
    restart = load_job(path).restart
    assert (restart.hang, restart.in_place, restart.unconditional) == (False, True, False)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.integers(min_value=10**20, max_value=10**30),
    st.text(max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=8), parts),
    max_leaves=6,
)
SECTIONS = st.sampled_from(
    [
        *("steps", "seed", "env", "env_from", "engine", "restart", "watch", "checkpoint", "comm"),
        *("model", "batch", "optimizer", "preflight", "drill", "log_path", "peak_tflops"),
        *("restart.start_timeout_s", "engine.nodes", "engine.pod", "watch.low_for_s", "worker.cwd"),
        *("checkpoint.every_s", "checkpoint.failure_domains", "optimizer.betas", "worker.resume"),
    ]
)


@given(field=SECTIONS, value=VALUES)
def test_any_value_anywhere_is_a_job_or_one_line(tmp_path_factory, field, value):
    import yaml

    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(COMMAND)
    try:
        problem = str(load_job(path, [f"{field}={yaml.safe_dump(value, width=10**6)}"]).run_id)
    except InputError as error:
        problem = str(error)
    assert problem.isprintable()
