"""Recognise what a saved file is, and judge it. Pure.

A file is a JSON document of a tool, an XML document of nvidia-smi, a text of a tool, or a log; text
before and after a JSON document is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from slurm_resilience.health.documents import (
    dcgm_diag,
    dcgm_text,
    dcgm_watches,
    link_text,
    neuron_documents,
    smart_log,
    smi_facts,
    smi_judge,
    tool_text,
)
from slurm_resilience.health.documents.reading import DocumentReading
from slurm_resilience.health.grouping import FindingGroup
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.replay.conclusion import (
    Grouped,
    ReplayResult,
    conclude,
    incident,
)
from slurm_resilience.health.replay.log_replay import LogReplay
from slurm_resilience.health.replay.saved_log import saved_lines

UNKNOWN = "unknown"
LOG = "log"

_KERNEL_TEXT = re.compile(r"^[A-Za-z][\w/.\[\]() -]{0,60}: ?\S|^NVRM: |^segfault at ")
_JSON_START = re.compile(r"^\s*[{\[]", re.M)


class TextKind(NamedTuple):
    """A kind of text: its name, how it is known, and its judge."""

    name: str
    is_it: Callable[[str], bool]
    judge: Callable[[str, NodeProfile], DocumentReading]


def _query(text: str, profile: NodeProfile) -> DocumentReading:
    return smi_judge.judge_smi(smi_facts.from_query_text(text), profile)


def _query_csv(text: str, profile: NodeProfile) -> DocumentReading:
    return smi_judge.judge_smi(smi_facts.from_csv(text), profile)


def _xml(text: str, profile: NodeProfile) -> DocumentReading:
    output = smi_facts.from_xml(text)
    if output is None:
        return DocumentReading(unjudged=("the XML document is cut off or damaged",))
    return smi_judge.judge_smi(output, profile)


def _smi_overview(text: str, profile: NodeProfile) -> DocumentReading:
    reading = tool_text.judge_smi_error(text)
    counted = tool_text.smi_gpu_count(text)
    if counted is None and not reading.findings:
        return reading.plus(DocumentReading(unjudged=("no GPU is named",)))
    return reading.plus(
        smi_judge.judge_gpu_count(counted, profile) if counted is not None else DocumentReading()
    )


def _is_query_csv(text: str) -> bool:
    head = text.lstrip().partition("\n")[0]
    cells = [cell.strip() for cell in head.split(",")]
    return len(cells) > 1 and any(re.fullmatch(r"[a-z_]+(\.[a-z_.]+)+.*", cell) for cell in cells)


TEXT_KINDS: tuple[TextKind, ...] = (
    TextKind("nvidia-smi -q -x", lambda text: "<nvidia_smi_log" in text, _xml),
    TextKind("nvidia-smi -q", lambda text: "NVSMI LOG" in text, _query),
    TextKind("nvidia-smi nvlink", link_text.is_smi_nvlink, link_text.judge_smi_nvlink),
    TextKind(
        "dcgmi nvlink",
        link_text.is_dcgm_nvlink,
        lambda text, profile: link_text.judge_dcgm_nvlink(text),
    ),
    TextKind(
        "clock event reasons",
        link_text.is_throttle_list,
        lambda text, profile: link_text.judge_throttle_list(text),
    ),
    TextKind("nvidia-smi --query-gpu", _is_query_csv, _query_csv),
    TextKind("InfiniBand port", link_text.is_port_dump, link_text.judge_port_dump),
    TextKind("ibstat", link_text.is_ibstat, link_text.judge_ibstat),
    TextKind("ethtool", link_text.is_ethtool, lambda text, profile: link_text.judge_ethtool(text)),
    TextKind(
        "ipmitool sel",
        tool_text.is_ipmi_events,
        lambda text, profile: tool_text.judge_ipmi_events(text),
    ),
    TextKind("fi_info", tool_text.is_fi_info, tool_text.judge_fi_info),
    TextKind(
        "fi_pingpong",
        tool_text.is_fi_pingpong,
        lambda text, profile: tool_text.judge_fi_pingpong(text),
    ),
    TextKind(
        "stress-ng",
        tool_text.is_stress_ng,
        lambda text, profile: tool_text.judge_stress_ng(text),
    ),
    TextKind("nvidia-smi", tool_text.is_smi_error, _smi_overview),
    TextKind(
        "dcgmi diag table",
        dcgm_text.is_dcgm_table,
        lambda text, profile: dcgm_text.judge_dcgm_table(text),
    ),
    TextKind("neuron-ls", neuron_documents.is_neuron_table, neuron_documents.judge_neuron_table),
    TextKind("lspci", tool_text.is_lspci, tool_text.judge_lspci),
    TextKind(
        "Neuron counters",
        neuron_documents.is_neuron_counters,
        lambda text, profile: neuron_documents.judge_neuron_counters(text),
    ),
)


_OVERLONG_NUMBER = re.compile(r"(\d{300})\d+")
"""No tool writes such a number, and Python makes none of more than 4,300 digits."""


def replay(text: str, profile: NodeProfile | None = None) -> ReplayResult:
    """Return the verdict on a file, whatever it is.

    Args:
        text: all of it.
        profile: the hardware that the node should have.
    """
    profile = profile or NodeProfile()
    text = _OVERLONG_NUMBER.sub(r"\1", text)
    if not text.strip():
        return conclude(UNKNOWN, (), ("the file is empty",), ())
    if (data := _json_within(text)) is not None and (judged := _judge_json(data, profile)):
        return _document(*judged)
    for kind in TEXT_KINDS:
        if kind.is_it(text):
            return _document(kind.name, kind.judge(text, profile))
    return _log(text)


def _judge_json(data: Any, profile: NodeProfile) -> tuple[str, DocumentReading] | None:
    if dcgm_diag.recognises_dcgm_diag(data):
        return "dcgmi diag", dcgm_diag.judge_dcgm_diag(data)
    if dcgm_watches.recognises_dcgm_health(data):
        return "dcgmi health", dcgm_watches.judge_dcgm_health(data)
    if neuron_documents.recognises_neuron(data):
        return "Neuron tools", neuron_documents.judge_neuron(data, profile)
    if smart_log.recognises_smart_log(data):
        return "NVMe health log", smart_log.judge_smart_log(data)
    return None


def _json_within(text: str) -> Any:
    """Return the JSON document in a text that may have lines before and after it."""
    for start in list(_JSON_START.finditer(text))[:20]:
        try:
            data, _ = json.JSONDecoder().raw_decode(text[start.start() :].lstrip())
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict | list):
            return data
    return None


def _document(kind: str, reading: DocumentReading) -> ReplayResult:
    incidents = tuple(
        incident(Grouped(FindingGroup(finding, (finding.code,), 0.0)))
        for finding in reading.findings
    )
    return conclude(kind, incidents, reading.unjudged, reading.notes)


def _log(text: str) -> ReplayResult:
    log = LogReplay()
    lines = text.splitlines()
    log.feed_all(saved_lines(lines))
    incidents = log.incidents()
    known = log.framed_lines + sum(bool(_KERNEL_TEXT.match(line)) for line in lines)
    if not incidents and 2 * known < log.lines:
        return conclude(UNKNOWN, (), ("no tool's output and no log that is known",), ())
    return conclude(LOG, incidents, (), ())
