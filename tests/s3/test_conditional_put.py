"""Writers that race for one key, on a store that keeps the condition and on one that does not."""

from __future__ import annotations

import random
import subprocess
import sys
from threading import Event

import pytest

from perdure.storage.retry import Retry
from tests.s3.conftest import RCLONE, Opener
from tests.s3.proxy import InUpload
from tests.s3.servers import Server
from tests.unit.storage.stores import race

NUM_WRITERS = 8
TIMEOUT_S = 1.0  # to connect and to read; a claim lives five times as long

WRITER = """
import sys
from tests.s3.conftest import open_s3
store = open_s3(int(sys.argv[1]), sys.argv[2], connect_timeout_s=1.0, read_timeout_s=1.0)
store.put("key", b"of the killed", if_absent=True)
"""


@pytest.mark.parametrize(
    ("server", "keeps_condition"),
    [
        pytest.param("rclone", False, marks=pytest.mark.process),
        pytest.param("rgw", True, marks=pytest.mark.process),
    ],
    indirect=["server"],
)
def test_one_of_eight_writers_wins_every_race(
    server: Server, open_store: Opener, *, keeps_condition: bool
) -> None:
    # The same random numbers for all, as processes have that were forked from one.
    retries = [Retry(rng=random.Random(0)) for _ in range(NUM_WRITERS)]  # noqa: S311 the point
    stores = [open_store(direct=True, retry=retry) for retry in retries]
    assert stores[0].has_conditional_put() is keeps_condition
    for number in range(4):
        race(stores, f"races/{number}")
    listed = [info.key for info in stores[0].list("")]
    assert listed == [f"races/{number}" for number in range(4)], "claims do not show"


@pytest.mark.parametrize("server", [RCLONE], indirect=True)
def test_a_writer_killed_with_a_claim_in_hand_holds_the_others_up_for_its_lifetime_only(
    server, proxy, open_store
):
    has_claim, released = Event(), proxy.released

    def freeze() -> None:
        has_claim.set()
        released.wait(240)

    proxy.inject(InUpload(freeze, after_bytes=1), method="PUT", path="ticket-")
    store = open_store(direct=True, connect_timeout_s=TIMEOUT_S, read_timeout_s=TIMEOUT_S)
    command = [sys.executable, "-c", WRITER, str(proxy.server_port), store._prefix]
    with subprocess.Popen(command) as writer:
        assert has_claim.wait(240)
        writer.kill()
    others = [
        open_store(direct=True, connect_timeout_s=TIMEOUT_S, read_timeout_s=TIMEOUT_S)
        for _ in range(2)
    ]
    race(others, "key")
    client = store._client()
    left = client.list_objects_v2(Bucket=store._bucket, Prefix=f"{store._prefix}.claims/")
    # rclone may list one key twice that two have put at once.
    assert {entry["Key"].rpartition("/")[2] for entry in left["Contents"]} == {"probe"}
