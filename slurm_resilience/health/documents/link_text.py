"""Judge texts about links and ports: NVLink, InfiniBand, Ethernet. Pure.

Counters are history: only their growth tells something, and one document shows none.
"""

from __future__ import annotations

import re

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Finding, Severity

_SMI_GPU = re.compile(r"^GPU (?P<index>\d+): (?P<product>.+?) \(UUID: ")
_SMI_LINK = re.compile(r"^\s+Link (?P<link>\d+): (?P<state>.+?)\s*$")
_DCGM_GPU = re.compile(r"^\s*gpuId (?P<index>\d+):")
_DCGM_LINKS = re.compile(r"^\s*(?:[UDX_] ?)+\s*$")
_CA = re.compile(r"^CA '(?P<name>[^']+)'|^hca_id:\s*(?P<hca>\S+)")
_HEX = re.compile(r"^0x[0-9a-fA-F]{1,16}$")
_PORT_KEYS = frozenset({"state", "phys_state", "rate", "link_layer"})

_HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
_THROTTLE_BITS = {
    _HW_SLOWDOWN: "hardware slowdown",
    _SW_THERMAL: "software thermal slowdown",
    _HW_THERMAL: "hardware thermal slowdown",
    _POWER_BRAKE: "power brake",
}


def judge_smi_nvlink(text: str, profile: NodeProfile) -> DocumentReading:
    """Judge `nvidia-smi nvlink -s`: every link of a product that has some is up."""
    up: dict[str, int] = {}
    down: dict[str, list[str]] = {}
    gpu, notes = "", []
    for line in text.splitlines():
        if head := _SMI_GPU.match(line):
            gpu = f"GPU {head['index']}"
            up.setdefault(gpu, 0)
        elif link := _SMI_LINK.match(line):
            if "inactive" in link["state"].lower():
                down.setdefault(gpu, []).append(link["link"])
            else:
                up[gpu] = up.get(gpu, 0) + 1
        elif "all links are inactive" in line.lower():
            down.setdefault(gpu, []).append("all")
    if profile.nvlinks == 0:
        return DocumentReading(notes=("this product has no NVLink: its links are not looked at",))
    findings = []
    for name, active in up.items():
        missing = down.get(name, [])
        if profile.nvlinks is not None and active >= profile.nvlinks:
            notes += [f"{name}: links {', '.join(missing)} are unused, as expected"] * bool(missing)
        elif missing or (profile.nvlinks is not None and active < profile.nvlinks):
            seen = f"{name}: {active} NVLinks are up"
            wanted = f", the profile expects {profile.nvlinks}" if profile.nvlinks else ""
            lost = f", inactive: {', '.join(missing)}" if missing else ""
            findings.append(_nvlink(f"{seen}{wanted}{lost}", name))
    return DocumentReading(tuple(findings), notes=tuple(notes))


def judge_dcgm_nvlink(text: str) -> DocumentReading:
    """Judge `dcgmi nvlink -s`: `D` is down, `U` is up, `X` switched off, `_` not there."""
    findings, gpu = [], ""
    for line in text.splitlines():
        if head := _DCGM_GPU.match(line):
            gpu = f"GPU {head['index']}"
        elif gpu and _DCGM_LINKS.match(line):
            down = [str(at) for at, state in enumerate(line.split()) if state == "D"]
            if down:
                findings.append(_nvlink(f"{gpu}: NVLinks {', '.join(down)} are down", gpu))
            gpu = ""
    return DocumentReading(tuple(findings))


def is_dcgm_nvlink(text: str) -> bool:
    """Tell whether a text is a table of `dcgmi nvlink -s`."""
    lines = text.splitlines()
    return any(map(_DCGM_GPU.match, lines)) and any(map(_DCGM_LINKS.match, lines))


def is_smi_nvlink(text: str) -> bool:
    """Tell whether a text is `nvidia-smi nvlink -s`."""
    has_links = "all links are inactive" in text or re.search(r"^\s+Link \d+: ", text, re.M)
    return bool(has_links) and bool(re.search(_SMI_GPU.pattern, text, re.M))


def _nvlink(text: str, gpu: str) -> Finding:
    return document_finding("nvlink", Severity.RESET, text, gpu.lower(), "down")


def is_throttle_list(text: str) -> bool:
    """Tell whether a text is a list of `clocks_event_reasons.active` values."""
    lines = text.split()
    return bool(lines) and all(map(_HEX.match, lines))


def judge_throttle_list(text: str) -> DocumentReading:
    """Judge the reasons why GPUs' clocks are held back, one mask a line."""
    findings = []
    for index, word in enumerate(text.split()):
        mask = int(word, 16)
        reasons = [name for bit, name in _THROTTLE_BITS.items() if mask & bit]
        if reasons:
            said = f"GPU {index}: its clocks are held back: {', '.join(reasons)} ({mask:#x})"
            findings.append(
                document_finding("throttle", Severity.MONITOR, said, f"gpu {index}", "throttled")
            )
    return DocumentReading(tuple(findings))


def port_values(text: str) -> dict[str, str]:
    """Return `name=value` or `name: value` lines of a port's directory in sysfs."""
    pairs = (re.match(r"^([\w/]+)\s*=\s*(.*?)\s*$", line) for line in text.splitlines())
    return {pair[1]: pair[2] for pair in pairs if pair}


def is_port_dump(text: str) -> bool:
    """Tell whether a text is a port's directory in sysfs, a value a line."""
    return len(_PORT_KEYS & set(port_values(text))) >= 2


def judge_port_dump(text: str, profile: NodeProfile) -> DocumentReading:
    """Judge one InfiniBand port from its files in sysfs."""
    values = port_values(text)
    state = values.get("state", "")
    return _port("port", state, values.get("phys_state", ""), values.get("rate", ""), profile)


def is_ibstat(text: str) -> bool:
    """Tell whether a text is of ibstat or of ibv_devinfo."""
    return bool(re.search(_CA.pattern, text, re.M)) and "state:" in text.lower()


def judge_ibstat(text: str, profile: NodeProfile) -> DocumentReading:
    """Judge the ports that ibstat or ibv_devinfo show."""
    reading = DocumentReading()
    name, state, physical, rate = "", "", "", ""

    def judged() -> DocumentReading:
        return _port(name, state, physical, rate, profile) if state else DocumentReading()

    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if head := _CA.match(line.strip()):
            reading = reading.plus(judged())
            name, state, physical, rate = head["name"] or head["hca"], "", "", ""
        elif key.lower() == "state":
            state = value
        elif key.lower() in ("physical state", "phys_state"):
            physical = value
        elif key.lower() == "rate":
            rate = value
    return reading.plus(judged())


def _port(name: str, state: str, physical: str, rate: str, profile: NodeProfile) -> DocumentReading:
    if not state:
        return DocumentReading(unjudged=(f"{name}: its state is missing",))
    is_up = (
        "ACTIVE" in state.upper() and "LINKUP" in (physical or "LinkUp").replace("_", "").upper()
    )
    if not is_up:
        text = f"{name} is not up: {state} {physical}".strip()
        # Down now is no proof of a fault: a port down for minutes is, and time shows only live.
        finding = document_finding("network_port", Severity.MONITOR, text, name, "down")
        return DocumentReading((finding,))
    wanted = profile.infiniband_rate
    if wanted and rate and not rate.startswith(wanted):
        text = f"{name} runs at {rate}, the profile expects {wanted}"
        finding = document_finding("network_port", Severity.MONITOR, text, name, "rate")
        return DocumentReading((finding,))
    return DocumentReading(notes=(f"{name} is up; its counters are history, only growth counts",))


def is_ethtool(text: str) -> bool:
    """Tell whether a text is of ethtool: a port's settings or its counters."""
    return bool(re.search(r"^Settings for \S+:", text, re.M)) or "NIC statistics:" in text


def judge_ethtool(text: str) -> DocumentReading:
    """Judge a port's link; its counters are history."""
    name = re.search(r"^Settings for (\S+):", text, re.M)
    port = name[1] if name else "the port"
    link = re.search(r"Link detected: (\w+)", text)
    if not link:
        return DocumentReading(notes=(f"{port}: counters are history, only growth counts",))
    if link[1] == "yes":
        return DocumentReading()
    finding = document_finding(
        "network_port", Severity.MONITOR, f"{port} has no link", port, "down"
    )
    return DocumentReading((finding,))
