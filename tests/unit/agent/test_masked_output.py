"""What workers print gets into their logs at once, and without secrets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.agent.masked_output import LiteralMask, MaskedOutput, scrub
from tests.waiting import wait_for

SECRET = "abcabcabd-the-secret"
OTHER = "the-secret-and-more"


@given(
    st.lists(st.sampled_from([SECRET, OTHER, SECRET[:7], "abc", "the-secret", "\n", "x"])),
    st.lists(st.integers(0, 200)),
)
def test_wherever_a_text_is_cut_it_has_the_same_masks(parts, cuts):
    text = "".join(parts).encode()
    whole = LiteralMask([SECRET, OTHER])
    expected = whole.feed(text) + whole.end()
    assert SECRET.encode() not in expected
    mask, output, at = LiteralMask([SECRET, OTHER]), b"", 0
    for cut in sorted(cuts):
        output += mask.feed(text[at:cut])
        at = max(at, cut)
    output += mask.feed(text[at:]) + mask.end()
    assert SECRET.encode() not in output
    assert output == expected


def test_text_without_a_beginning_of_a_secret_is_held_back_by_no_byte():
    mask = LiteralMask([SECRET])
    assert mask.feed(b"loading 10%") == b"loading 10%"
    assert mask.feed(b" abc") == b" ", "what a secret may begin with waits"
    assert mask.feed(b"xyz") == b"abcxyz"


@pytest.fixture
def output(tmp_path):
    output = MaskedOutput(tmp_path, frozenset({SECRET}))
    yield output
    output.close()


def test_a_process_prints_through_the_pipe_and_a_line_is_in_the_log_while_it_runs(output, tmp_path):
    log = tmp_path / "rank-0.log"
    program = f"import time; print('begin {SECRET} end', flush=True); time.sleep(60)"
    with output.pipe_of(log).open("ab") as pipe:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=pipe)
    try:
        wait_for(lambda: log.read_bytes() == b"begin *** end\n", what="the masked line")
    finally:
        process.kill()
        process.wait()
    assert output.pipe_of(log).stat().st_mode & 0o077 == 0


def test_much_output_is_complete_and_in_order_after_the_close(output, tmp_path):
    log = tmp_path / "rank-0.log"
    program = f"for n in range(20000): print(n, '{SECRET}')"
    with output.pipe_of(log).open("ab") as pipe:
        subprocess.run([sys.executable, "-c", program], stdout=pipe, check=True)
    output.close()
    assert log.read_text().splitlines() == [f"{n} ***" for n in range(20000)]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.log"]


def test_a_close_while_a_piece_is_on_its_way_loses_nothing(tmp_path):
    log = tmp_path / "rank-0.log"
    os.mkfifo(log)  # a log on a slow disk: it takes what has been read
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    output = MaskedOutput(tmp_path, frozenset({SECRET}))
    text = "".join(f"{n:07d} {SECRET}\n" for n in range(20_000)).encode()
    with output.pipe_of(log).open("wb", buffering=0) as pipe:
        pipe.write(text)

    def thread_waits_for_the_disk() -> bool:
        if is_free := output._lock.acquire(timeout=0.2):
            output._lock.release()
        return not is_free

    wait_for(thread_waits_for_the_disk)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            output.close()
        except BaseException as error:  # noqa: BLE001 whatever it is, the test shows it
            errors.append(error)

    closer = threading.Thread(target=close)
    closer.start()
    wait_for(output._closing.is_set, what="the close")
    os.set_blocking(reader, True)
    written = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    closer.join(240)
    os.close(reader)
    assert errors == []
    assert written == text.replace(SECRET.encode(), b"***")
    assert not output.folder.joinpath("rank-0.log.pipe").exists()


def test_a_full_disk_at_the_close_costs_the_end_of_the_log_alone(tmp_path, caplog):
    log = tmp_path / "rank-0.log"
    log.symlink_to("/dev/full")
    output = MaskedOutput(tmp_path, frozenset({SECRET}))
    path = output.pipe_of(log)
    with path.open("wb", buffering=0) as pipe:
        pipe.write(b"all but a secret: " + SECRET[:-1].encode())
    output.close()
    assert f"{log}: the end is lost: No space left on device" in caplog.text
    assert not path.exists()


def test_a_file_that_a_program_left_is_scrubbed(tmp_path):
    path = tmp_path / "error-0.json"
    path.write_text(f'{{"message": "no access with {SECRET}"}}')
    scrub(path, frozenset({SECRET}))
    assert path.read_text() == '{"message": "no access with ***"}'
    scrub(tmp_path / "none.json", frozenset({SECRET}))
    assert list(tmp_path.iterdir()) == [path]
