"""Checks of the NPUs' own network by hccn_tool: TLS, optical modules, addresses, pings.

The layouts are those of the driver's sources (hicann/driver at ef377e950a32, src/custom/network/
hccn) and of Ascend/mind-cluster's page on collecting logs. hccn_tool does not run twice at a time
on a node, so that its calls are made one after the other. It has no command for the table of GIDs:
the RoCE v2 GID of a port is its address. Powers are milliwatts, times seconds.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from perdure.training.config.job import Job
from perdure.training.config.recovery import RankTableForm
from perdure.training.node_checks.verdict import TLS
from perdure.training.telemetry.device_addresses import HCCN_CONF
from perdure.training.telemetry.npu_smi import parse_table
from perdure.training.telemetry.sampling import HCCN_TOOL, NPU_SMI
from perdure.training.telemetry.vendor_tools import (
    Ask,
    NoAnswer,
    find_tool,
    parse_fields,
    parse_number,
    read_assignments,
    run_tool,
)
from perdure.training.wire.node import Check, CheckOutcome, PingTarget, worst

OPTICS, GID, PING = "device_optics", "device_gid", "device_ping"
_PING_TIMEOUT_S = 20.0
_SWITCH = re.compile(r"tls switch\[(\d+)\]")
_LOSS = re.compile(r"(\d+(?:\.\d+)?)% packets? loss")
_LOST = ("recv time out seq", "Destination Host Unreachable", "pkt send fail seq")
_FLAG = re.compile(
    r"^(?P<name>[TR]x ?(?:Los|LoL|Lol|Fault) Flag)\s*:?\s*(?P<value>.+)$", re.MULTILINE
)
_Finding = tuple[CheckOutcome, str]


def check_ports(slots: int, *, ask_tool: Ask = run_tool) -> tuple[Check, ...]:
    """Check the optical module and the address of each device's port; none without hccn_tool."""
    devices = _physical(slots, ask_tool)
    if not devices:
        return ()
    conf = read_assignments(HCCN_CONF)
    return (
        _check_each(OPTICS, devices, partial(_optics, ask_tool), "light inside of its limits"),
        _check_each(GID, devices, partial(_gid, ask_tool, conf), "an address on every port"),
    )


def check_tls(slots: int, *, ask_tool: Ask = run_tool) -> tuple[Check, ...]:
    """Check that TLS is on for all devices, or off for all; none without hccn_tool."""
    devices = _physical(slots, ask_tool)
    if not devices:
        return ()
    allowed = "the same on all devices of all nodes"
    try:
        texts = {n: ask_tool((HCCN_TOOL, "-i", str(n), "-tls", "-g")) for n in devices}
    except NoAnswer as error:
        text = f"no answer: {error}"
        return (Check(name=TLS, outcome=CheckOutcome.WARNING, seen=text, allowed=allowed),)
    switches = {n: match[1] for n, text in texts.items() if (match := _SWITCH.search(text))}
    by_word: dict[str, list[str]] = {}
    for number, switch in switches.items():
        by_word.setdefault("off" if switch == "0" else "on", []).append(str(number))
    if not by_word:
        text, outcome = "hccn_tool shows no switch", CheckOutcome.SKIPPED
    elif len(by_word) == 1:
        text, outcome = f"TLS {next(iter(by_word))}", CheckOutcome.OK
    else:
        words = [f"{word} for device {', '.join(of)}" for word, of in sorted(by_word.items())]
        text, outcome = f"TLS {' and '.join(words)}", CheckOutcome.FAILED
    return (Check(name=TLS, outcome=outcome, seen=text, allowed=allowed),)


def _physical(slots: int, ask_tool: Ask) -> Sequence[int]:
    """List the numbers that hccn_tool knows the job's devices by; empty without the tools."""
    if find_tool(HCCN_TOOL) is None or find_tool(NPU_SMI) is None:
        return ()
    try:
        return [chip.physical for chip in parse_table(ask_tool((NPU_SMI, "info")))[:slots]]
    except NoAnswer:
        return ()  # the check of the devices has that


def _check_each(
    name: str, devices: Sequence[int], ask: Callable[[int], Iterator[_Finding]], allowed: str
) -> Check:
    """Ask about each device in turn; what is well is listed where nothing is wrong."""
    try:
        findings = [
            (outcome, f"device {number}: {text}")
            for number in devices
            for outcome, text in ask(number)
        ]
    except NoAnswer as error:
        findings = [(CheckOutcome.WARNING, f"no answer: {error}")]
    outcome = worst([result for result, _ in findings])
    summary = "; ".join(text for result, text in findings if result is outcome)
    return Check(name=name, outcome=outcome, seen=summary, allowed=allowed)


def _optics(ask_tool: Ask, number: int) -> Iterator[_Finding]:
    text = ask_tool((HCCN_TOOL, "-i", str(number), "-optical", "-g"))
    fields = parse_fields(text)
    complaints = [*_bad_powers(fields), *_bad_flags(text)]
    if fields.get("present", "present") != "present":
        yield CheckOutcome.WARNING, "no optical module is present"
    elif complaints:
        yield CheckOutcome.WARNING, ", ".join(complaints)
    elif "optical info" in text or "RxLos Flag" in text:
        yield CheckOutcome.OK, "light inside of its limits"
    else:  # a device without a port of its own
        yield CheckOutcome.SKIPPED, (text.strip().splitlines() or ["nothing printed"])[-1][:200]


def _bad_powers(fields: Mapping[str, str]) -> Iterator[str]:
    """Name the powers outside of the module's own limits; a module has up to four lanes."""
    for name, value in fields.items():
        match = re.fullmatch(r"([TR]x) Power\d?", name)
        power = _milliwatts(value) if match else None
        if match is None or power is None:
            continue
        low = _milliwatts(fields.get(f"{match[1]}Power Low Thres", ""))
        high = _milliwatts(fields.get(f"{match[1]}Power High Thres", ""))
        if low is not None and power < low:
            yield f"{name} {value} is below {low:g} mW"
        elif high is not None and power > high:
            yield f"{name} {value} is above {high:g} mW"


def _milliwatts(text: str) -> float | None:
    number, _, unit = text.partition(" ")
    return parse_number(number) if unit == "mW" else None


def _bad_flags(text: str) -> Iterator[str]:
    """Name the flags of lost light and lost lock, as bits of lanes or as a word for each lane."""
    for match in _FLAG.finditer(text):
        value = match["value"].strip()
        if "Abnormal" in value or re.fullmatch(r"0x0*[1-9a-fA-F][0-9a-fA-F]*", value):
            yield f"{match['name'].strip()} {value if value.startswith('0x') else 'Abnormal'}"


def _gid(ask_tool: Ask, conf: Mapping[str, str], number: int) -> Iterator[_Finding]:
    text = ask_tool((HCCN_TOOL, "-i", str(number), "-ip", "-g"))
    address = parse_fields(text).get("ipaddr", "")
    noted = conf.get(f"address_{number}")
    try:
        gid = _gid_of(address)
    except ValueError:
        yield CheckOutcome.WARNING, "no address, and thus no GID that other nodes could reach"
        return
    if noted and noted != address:
        text = f"its address is {address}, {HCCN_CONF} has {noted}"
        yield CheckOutcome.FAILED, text
    else:
        yield CheckOutcome.OK, gid


def _gid_of(address: str) -> str:
    """Return the RoCE v2 GID of an address: itself, an IPv4 address as a mapped one.

    Raises:
        ValueError: it is no address.
    """
    parsed = ipaddress.ip_address(address)
    return f"::ffff:{parsed}" if parsed.version == 4 else str(parsed)


def ping_targets(ports: Mapping[int, Sequence[str]]) -> dict[int, tuple[PingTarget, ...]]:
    """Choose the ports of other nodes that each member pings: its neighbors', in a ring. Pure.

    Each device pings once, those with even numbers the next node and the others the node before. A
    node with a single device pings both. A node whose own port is lost loses all of its pings, and
    a node beside it only some, unless there are only two.

    Args:
        ports: addresses of the devices by local rank, by member, of those that know them.
    """
    members = sorted(ports)
    targets: dict[int, tuple[PingTarget, ...]] = {}
    for at, member in enumerate(members):
        sides = [members[(at + 1) % len(members)], members[at - 1]]
        pairs = [(device, sides[device % 2]) for device in range(len(ports[member]))]
        if len(pairs) == 1:
            pairs = [(0, side) for side in dict.fromkeys(sides)]
        targets[member] = tuple(
            PingTarget(device=device, member=side, address=ports[side][device])
            for device, side in pairs
            if side != member and "".join(ports[side][device : device + 1])
        )
    return targets


def check_pings(
    job: Job,
    targets: Sequence[PingTarget],
    *,
    until_s: float,
    ask_tool: Callable[..., str] = run_tool,
) -> tuple[Check, ...]:
    """Ping the ports of other nodes; none without targets or hccn_tool.

    A node that loses every ping fails, except in a super pod, where nodes need no RoCE.

    Args:
        job: tells whether its nodes are of a super pod.
        targets: ports of other nodes.
        until_s: no ping begins after it, by the monotonic clock.
        ask_tool: runs a tool.
    """
    devices = _physical(job.engine.slots_per_node, ask_tool) if targets else ()
    losses: list[tuple[float, str]] = []
    silent: list[str] = []
    for target in targets:
        if target.device >= len(devices) or time.monotonic() > until_s:
            continue
        where = f"device {devices[target.device]} to node {target.member} ({target.address})"
        command = (
            HCCN_TOOL,
            "-i",
            str(devices[target.device]),
            "-ping",
            "-g",
            "address",
            target.address,
        )
        try:
            loss = parse_loss(ask_tool(command, timeout_s=_PING_TIMEOUT_S))
        except NoAnswer:
            loss = None
        if loss is None:
            silent.append(f"{where}: no result")
        else:
            losses.append((loss, f"{where}: {loss:g}% lost"))
    return (_judge_pings(job, losses, silent),) if losses or silent else ()


def _judge_pings(job: Job, losses: Sequence[tuple[float, str]], silent: Sequence[str]) -> Check:
    bad = [text for loss, text in losses if loss > 0]
    outcome = CheckOutcome.WARNING if bad or silent else CheckOutcome.OK
    is_super_pod = job.comm.chip == "a3" or job.comm.rank_table is RankTableForm.V1_2
    if losses and all(loss == 100 for loss, _ in losses) and not is_super_pod:
        outcome = CheckOutcome.FAILED
    summary = "; ".join((*bad, *silent)) or f"{len(losses)} ports of other nodes answer"
    return Check(name=PING, outcome=outcome, seen=summary, allowed="every ping answered")


def parse_loss(text: str) -> float | None:
    """Parse the share of lost packets of `-ping` and `-hccs_ping`, in percent; None: other text."""
    match = _LOSS.search(text)
    if match:
        return float(match[1])
    return 100.0 if any(word in text for word in _LOST) else None
