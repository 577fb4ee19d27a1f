"""What hccn_tool prints about the network port of an NPU, read.

The words of its health are Success, Init, Socket failed and the like; `-link_stat` keeps the last
changes of the link, newest first. Counters run since the driver was loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from perdure.training.health.sources.vendor_tools import fields

_COUNTER = re.compile(r"^\s*(\w+)\s*:\s*(\d+)\s*$", re.MULTILINE)
_PREFIX = re.compile(r"^\[dev(?:ice|id) \d+\]\s*", re.MULTILINE)
_CHANGE = re.compile(r"^(\w{3} \w{3} +\d+ [\d:]{8} \d{4})\s+LINK (UP|DOWN)\s*$", re.MULTILINE)
ERROR_COUNTERS = ("roce_rx_err_pkt_num", "roce_tx_err_pkt_num", "roce_qp_status_err_num")


@dataclass(frozen=True, slots=True)
class LinkHistory:
    """`-link_stat -g`.

    Attributes:
        now: the tool's clock, as it prints it.
        up_count: how often the link came up.
        changes: (time, whether it came up), newest first.
    """

    now: str
    up_count: int
    changes: tuple[tuple[str, bool], ...]

    @property
    def num_losses(self) -> int:
        """How often it went down, as far back as the record goes."""
        return sum(not came_up for _, came_up in self.changes)


def parse_link(text: str) -> bool | None:
    """`-link -g`: whether the link is up; None when it is not printed."""
    word = fields(text).get("link status")
    return None if word is None else word.upper() == "UP"


def parse_net_health(text: str) -> str | None:
    """`-net_health -g`: as printed; None when it is not printed."""
    return fields(text).get("net health status") or None


def parse_counters(text: str) -> dict[str, int]:
    """`-stat -g`: every counter of the port."""
    return {name: int(value) for name, value in _COUNTER.findall(text)}


def parse_link_history(text: str) -> LinkHistory | None:
    """`-link_stat -g`; None when it is not printed."""
    plain = _PREFIX.sub("", text)
    found = fields(plain)
    count = found.get("link up count", "")
    if not count.isdigit():
        return None
    changes = tuple((when, word == "UP") for when, word in _CHANGE.findall(plain))
    return LinkHistory(found.get("current time", ""), int(count), changes)
