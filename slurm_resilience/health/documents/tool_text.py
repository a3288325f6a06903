"""Judge texts of ipmitool, fi_info, fi_pingpong and stress-ng, and nvidia-smi's errors. Pure."""

from __future__ import annotations

import re

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Severity

_SEL = re.compile(
    r"^\s*[0-9a-fA-F]+ \| [^|]* \| [^|]*\| (?P<sensor>[^|]+) \| (?P<event>[^|]+) \| (?P<state>.+)$",
    re.M,
)
_SEL_RULES = (
    (re.compile(r"Bus Fatal|Fatal Error|PCI SERR|PCI PERR|IERR|CATERR", re.I), Severity.REBOOT),
    (re.compile(r"Uncorrectable (?:machine check|ECC)", re.I), Severity.REPLACE),
    (
        re.compile(
            r"Correctable|Non-?recoverable|Upper Critical|Lower Critical|Failure detected"
            r"|AC lost|Power Supply|Predictive|Bus Uncorrectable|Non-Fatal",
            re.I,
        ),
        Severity.MONITOR,
    ),
)
_PCI = re.compile(
    r"^(?P<bdf>(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<name>[A-Z3][\w -]+"
    r"(?: \[[0-9a-f]{4}\])?: .+)$",
    re.M,
)
_PAST_WORDS = ("deasserted",)

_SMI_ERRORS: tuple[tuple[str, Severity, str], ...] = (
    ("GPU is lost", Severity.REBOOT, "a GPU is lost"),
    ("fallen off the bus", Severity.REBOOT, "a GPU has fallen off the bus"),
    ("requires reset", Severity.RESET, "a GPU requires a reset"),
    ("Unable to determine the device handle", Severity.REBOOT, "a GPU does not answer"),
    ("couldn't communicate with the NVIDIA driver", Severity.REBOOT, "the driver does not answer"),
    ("Driver/library version mismatch", Severity.MONITOR, "an update waits for a reboot"),
)


def is_ipmi_events(text: str) -> bool:
    """Tell whether a text is of `ipmitool sel list`."""
    return bool(_SEL.search(text))


def judge_ipmi_events(text: str) -> DocumentReading:
    """Judge the events that a machine's management controller keeps."""
    findings = []
    for match in _SEL.finditer(text):
        if match["state"].strip().lower() in _PAST_WORDS:
            continue
        event, sensor = match["event"].strip(), match["sensor"].strip()
        severity = next((s for rule, s in _SEL_RULES if rule.search(event)), None)
        severity = severity or next((s for r, s in _SEL_RULES[2:] if r.search(sensor)), None)
        if severity is not None:
            text_of_it = f"{sensor}: {event}"
            findings.append(
                document_finding("ipmi", severity, text_of_it, sensor, event, match[0].strip())
            )
    return DocumentReading(tuple(findings))


def is_smi_error(text: str) -> bool:
    """Tell whether a text is an error of nvidia-smi, or its list or table of GPUs."""
    starts = ("Unable to determine the device handle", "Failed to initialize NVML")
    return (
        text.lstrip().startswith(starts)
        or "NVIDIA-SMI" in text
        or text.strip() == "No devices were found"
        or bool(re.search(r"^GPU \d+: .+\(UUID: ", text, re.M))
    )


def judge_smi_error(text: str) -> DocumentReading:
    """Judge what nvidia-smi prints instead of a report, or in its overview."""
    for words, severity, meaning in _SMI_ERRORS:
        if words in text:
            finding = document_finding("nvidia_smi", severity, meaning, code="error", evidence=text)
            return DocumentReading((finding,))
    if re.search(r"\bERR!", text):
        finding = document_finding(
            "nvidia_smi", Severity.REBOOT, "the driver cannot read a GPU (ERR!)", code="unreadable"
        )
        return DocumentReading((finding,))
    return DocumentReading()


def smi_gpu_count(text: str) -> int | None:
    """Return the GPUs in a list (`nvidia-smi -L`) or in the overview; None when it names none."""
    if "No devices were found" in text:
        return 0
    listed = len(set(re.findall(r"^GPU (\d+): .+\(UUID: ", text, re.M)))
    shown = len(re.findall(r"^\|\s+\d+\s+\S.*\|\s*[0-9A-Fa-f]{8}:[0-9A-Fa-f:.]+", text, re.M))
    return listed or shown or None


def is_fi_info(text: str) -> bool:
    """Tell whether a text is of fi_info."""
    return text.startswith(("provider: ", "fi_getinfo: "))


def judge_fi_info(text: str, profile: NodeProfile) -> DocumentReading:
    """Judge the providers that libfabric finds."""
    domains = set(re.findall(r"^\s+domain: (\S+)", text, re.M))
    is_efa = "provider: efa" in text
    efa = len({domain.rsplit("-", 1)[0] for domain in domains}) if is_efa else 0
    wanted = profile.efa_devices
    if wanted is not None and wanted > 0 and (is_efa or "fi_getinfo:" in text) and efa < wanted:
        said = f"{efa} EFA devices, the profile expects {wanted}"
        return DocumentReading(
            (document_finding("efa", Severity.REBOOT, said, code="missing", evidence=text),)
        )
    if "fi_getinfo:" in text:
        return DocumentReading(unjudged=("libfabric finds no such provider (fi_getinfo)",))
    return DocumentReading()


def is_fi_pingpong(text: str) -> bool:
    """Tell whether a text is of fi_pingpong."""
    return "util/pingpong.c" in text or bool(re.search(r"^bytes\s+#sent\s+#ack", text, re.M))


def judge_fi_pingpong(text: str) -> DocumentReading:
    """Judge a test of a connection: without a row of results nothing was measured."""
    if re.search(r"^\d+[kmg]?\s+\d+\S*\s+=?\d+", text, re.M) and "[error]" not in text:
        return DocumentReading()
    error = re.search(r"\[error\].*", text)
    return DocumentReading(unjudged=(f"nothing was measured: {error[0] if error else 'no row'}",))


def is_lspci(text: str) -> bool:
    """Tell whether a text is of lspci."""
    return bool(_PCI.search(text))


def judge_lspci(text: str, profile: NodeProfile) -> DocumentReading:
    """Judge the number of devices, and those that do not answer: their revision reads as ff."""
    findings = [
        document_finding(
            "pci",
            Severity.REBOOT,
            f"{match['bdf']} does not answer (revision ff): {match['name']}",
            match["bdf"],
            "gone",
        )
        for match in _PCI.finditer(text)
        if "(rev ff)" in match["name"]
    ]
    counts = (
        ("GPUs", r"(?:3D|VGA compatible) controller: NVIDIA", profile.gpus),
        ("EFA devices", r"Elastic Fabric Adapter", profile.efa_devices),
        ("Neuron devices", r"Neuron|Trainium|Inferentia", profile.neuron_devices),
    )
    for what, pattern, wanted in counts:
        seen = len(re.findall(pattern, text))
        if wanted is not None and seen < wanted:
            said = f"{seen} {what}, the profile expects {wanted}"
            findings.append(document_finding("pci", Severity.REBOOT, said, code=f"missing {what}"))
    return DocumentReading(tuple(findings))


def is_stress_ng(text: str) -> bool:
    """Tell whether a text is the log of stress-ng."""
    return bool(re.search(r"^stress-ng: (?:info|error|fail|metrc|warn)", text, re.M))


def judge_stress_ng(text: str) -> DocumentReading:
    """Judge a burn of processors and memory."""
    fail = re.search(r"^stress-ng: fail.*", text, re.M)
    if fail and re.search(r"memory|bit|corrupt|verif|mismatch", fail[0], re.I):
        said = f"a computation or memory gave a wrong result: {fail[0]}"
        finding = document_finding("stress", Severity.REPLACE, said, code="wrong", evidence=fail[0])
        return DocumentReading((finding,))
    if fail or "unsuccessful run" in text:
        line = fail[0] if fail else "unsuccessful run"
        finding = document_finding("stress", Severity.MONITOR, line, code="failed", evidence=line)
        return DocumentReading((finding,))
    if "successful run completed" in text:
        return DocumentReading()
    return DocumentReading(unjudged=("the run did not come to its end",))
