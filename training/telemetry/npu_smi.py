"""Parsers for npu-smi and hccn_tool: the table of chips, a chip's readings, and its network port.

Layouts of npu-smi 23.0 to 26.0. The table has two rows for a chip; since 25.0 the second row may
carry the number by which workers count (Phy-ID). Percentages are 0 to 100, sizes bytes.

hccn_tool reports the health of a port as Success, Init, Socket failed and the like; `-link_stat`
lists the last changes of the link, newest first. Counters run since the driver was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.training.telemetry.vendor_tools import parse_fields, parse_number

MIB = 1 << 20
# A row of the table: three columns between bars.
_ROW = re.compile(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|\s*$")
# A row of the table of processes: card and chip, process, name, memory.
_PROCESS = re.compile(r"^\|\s*\d+\s+\d+\s*\|\s*\d+\s*\|[^|]*\|[^|]*\|\s*$", re.MULTILINE)
_USED_OF_TOTAL = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip of the table, in the order of the table.

    Attributes:
        npu: number of the card, for `-i`.
        chip: number of the chip on it, for `-c`.
        physical: number of the device on the node; the card's where the table has none.
        health: OK, Warning, Alarm, Critical, or a word that is new.
    """

    npu: int
    chip: int
    physical: int
    name: str
    health: str
    power_w: float | None
    temperature_c: float | None
    utilisation_percent: float | None
    memory_used_bytes: int
    memory_total_bytes: int

    @property
    def memory_percent(self) -> float | None:
        """Used share of its memory."""
        total = self.memory_total_bytes
        return 100.0 * self.memory_used_bytes / total if total else None


@dataclass(frozen=True, slots=True)
class Health:
    """`-t health`: a word, and the codes and sentences behind it."""

    word: str | None
    error_codes: tuple[str, ...] = ()
    information: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ecc:
    """`-t ecc`: memory errors of a card since its driver was loaded, HBM and DDR together.

    Attributes:
        double_bit: errors that could not be corrected.
        isolated_pages: pages of memory taken out of use for them.
    """

    single_bit: int
    double_bit: int
    isolated_pages: int


@dataclass(frozen=True, slots=True)
class Usage:
    """`-t usages` of a chip."""

    memory_total_bytes: int | None
    memory_percent: float | None
    utilisation_percent: float | None


def parse_processes(text: str) -> int:
    """Count the processes of `npu-smi info` that use a chip."""
    return len(_PROCESS.findall(text))


def parse_table(text: str) -> tuple[Chip, ...]:
    """Parse the chips of `npu-smi info`; empty when there is no table."""
    chips: list[Chip] = []
    above: tuple[str, ...] | None = None
    for line in text.splitlines():
        row = _ROW.match(line)
        cells = tuple(cell.strip() for cell in row.groups()) if row is not None else None
        if cells is None or not cells[0][:1].isdigit():
            above = None
        elif above is None:
            above = cells
        else:
            chips += _parse_chip(above, cells)
            above = None
    return tuple(chips)


def _parse_chip(upper: Sequence[str], lower: Sequence[str]) -> list[Chip]:
    """Parse rows `npu name | health | power ...` and `chip [phy] | bus | aicore memory hbm`."""
    npu, _, name = upper[0].partition(" ")
    chip, _, physical = lower[0].partition(" ")
    readings, used = upper[2].split(), lower[2].split()
    pools = [(int(part), int(whole)) for part, whole in _USED_OF_TOTAL.findall(lower[2])]
    if not (npu.isdigit() and chip.isdigit() and readings and used and pools):
        return []  # the table of processes looks alike
    memory = pools[-1] if pools[-1][1] else pools[0]  # HBM; a card without it has DDR alone
    return [
        Chip(
            npu=int(npu),
            chip=int(chip),
            physical=int(physical) if physical.strip().isdigit() else int(npu),
            name=name.strip(),
            health=upper[1],
            power_w=parse_number(readings[0]),
            temperature_c=parse_number(readings[1]) if len(readings) > 1 else None,
            utilisation_percent=parse_number(used[0]),
            memory_used_bytes=memory[0] * MIB,
            memory_total_bytes=memory[1] * MIB,
        )
    ]


def parse_health(text: str) -> Health:
    """Parse `npu-smi info -t health`, with and without `-c`; no word from other text."""
    values = parse_fields(text)
    word = values.get("Health Status") or values.get("Health")
    printed = values.get("Error Code", "NA")
    codes = () if printed in ("NA", "") else tuple(printed.split())
    sentences = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("Error Information", "") and value.strip() not in ("NA", ""):
            sentences.append(value.strip())
    return Health(word, codes, tuple(sentences))


def parse_ecc(text: str) -> Ecc | None:
    """Parse `npu-smi info -t ecc`, in both its layouts; None for other text."""
    counts = {name: int(value) for name, value in parse_fields(text).items() if value.isdigit()}
    if not any("Error Count" in name for name in counts):
        return None

    def total(*words: str) -> int:
        return sum(n for name, n in counts.items() if all(word in name for word in words))

    return Ecc(
        single_bit=total("Single Bit Error Count"),
        double_bit=total("Double Bit Error Count"),
        isolated_pages=total("Double Bit Isolated Pages Count"),
    )


def parse_usages(text: str) -> tuple[Usage, ...]:
    """Parse `npu-smi info -t usages`: each chip's block of the card ends with its Chip ID."""
    blocks = re.split(r"^\s*Chip ID\s*:.*$", text, flags=re.MULTILINE)
    return tuple(usage for usage in map(_parse_usage, blocks) if usage is not None)


def _parse_usage(block: str) -> Usage | None:
    values = parse_fields(block)
    core = parse_number(values.get("Aicore Usage Rate(%)"))
    whole = parse_number(values.get("NPU Utilization(%)"))  # newer drivers; it counts all cores
    if core is None and whole is None:
        return None
    total = parse_number(values.get("HBM Capacity(MB)"))
    return Usage(
        memory_total_bytes=int(total) * MIB if total is not None else None,
        memory_percent=parse_number(values.get("HBM Usage Rate(%)")),
        utilisation_percent=core if whole is None else whole,
    )


def fill_usage(chip: Chip, usage: Usage) -> Chip:
    """Add the utilisation of `-t usages` to a chip whose row had none."""
    if chip.utilisation_percent is not None:
        return chip
    return replace(chip, utilisation_percent=usage.utilisation_percent)


_COUNTER = re.compile(r"^\s*(\w+)\s*:\s*(\d+)\s*$", re.MULTILINE)
_PREFIX = re.compile(r"^\[dev(?:ice|id) \d+\]\s*", re.MULTILINE)
_CHANGE = re.compile(r"^(\w{3} \w{3} +\d+ [\d:]{8} \d{4})\s+LINK (UP|DOWN)\s*$", re.MULTILINE)
ERROR_COUNTERS = ("roce_rx_err_pkt_num", "roce_tx_err_pkt_num", "roce_qp_status_err_num")


@dataclass(frozen=True, slots=True)
class LinkHistory:
    """The changes of a link, `-link_stat -g`.

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
        """Number of losses of the link, as far back as the record goes."""
        return sum(not came_up for _, came_up in self.changes)


def parse_link(text: str) -> bool | None:
    """Parse `-link -g`: whether the link is up; None for other text."""
    word = parse_fields(text).get("link status")
    return None if word is None else word.upper() == "UP"


def parse_net_health(text: str) -> str | None:
    """Parse `-net_health -g`: the word as printed; None for other text."""
    return parse_fields(text).get("net health status") or None


def parse_counters(text: str) -> dict[str, int]:
    """Parse `-stat -g`: every counter of the port."""
    return {name: int(value) for name, value in _COUNTER.findall(text)}


def parse_link_history(text: str) -> LinkHistory | None:
    """Parse `-link_stat -g`; None for other text."""
    plain = _PREFIX.sub("", text)
    values = parse_fields(plain)
    count = values.get("link up count", "")
    if not count.isdigit():
        return None
    changes = tuple((when, word == "UP") for when, word in _CHANGE.findall(plain))
    return LinkHistory(values.get("current time", ""), int(count), changes)
