"""Facts about GPUs from the outputs of nvidia-smi: `-q -x`, `-q` and `--query-gpu`. Pure.

All three become one form: for each GPU a dictionary of lower-case paths, `remapped_rows/pending`,
to the words that stand there.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import NamedTuple

GpuFacts = dict[str, str]

_GPU_HEAD = re.compile(r"^GPU (?P<id>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*$")
_NOT_WORD = re.compile(r"[^a-z0-9]+")


class SmiOutput(NamedTuple):
    """One output: the GPUs, and the number that nvidia-smi says are attached."""

    gpus: tuple[GpuFacts, ...]
    attached: int | None = None


def _key(text: str) -> str:
    return _NOT_WORD.sub("_", text.lower()).strip("_")


def from_xml(text: str) -> SmiOutput | None:
    """Read `nvidia-smi -q -x`; None when it is no well-formed document."""
    try:
        root = ET.fromstring(text[text.index("<") :])
    except (ET.ParseError, ValueError):
        return None
    gpus = []
    for gpu in root.iter("gpu"):
        facts = {"id": gpu.get("id", "")}
        _walk(gpu, "", facts)
        gpus.append(facts)
    attached = (root.findtext("attached_gpus") or "").strip()
    return SmiOutput(tuple(gpus), int(attached) if attached.isdecimal() else None)


def _walk(element: ET.Element, path: str, facts: GpuFacts) -> None:
    for child in element:
        name = f"{path}/{_key(child.tag)}" if path else _key(child.tag)
        if len(child):
            _walk(child, name, facts)
        else:
            facts[name] = (child.text or "").strip()


def from_query_text(text: str) -> SmiOutput:
    """Read `nvidia-smi -q`: the indentation says to which heading a line belongs."""
    gpus: list[GpuFacts] = []
    attached = None
    headings: list[tuple[int, str]] = []
    for line in text.splitlines():
        if head := _GPU_HEAD.match(line):
            gpus.append({"id": head["id"]})
            headings = []
            continue
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        name, colon, value = line.strip().partition(" : ")
        if not gpus:
            if _key(name) == "attached_gpus" and value.strip().isdecimal():
                attached = int(value)
            continue
        while headings and headings[-1][0] >= indent:
            headings.pop()
        if colon or name.endswith(" :"):
            path = "/".join([*(heading for _, heading in headings), _key(name)])
            gpus[-1][path] = value.strip()
        else:
            headings.append((indent, _key(name)))
    return SmiOutput(tuple(gpus), attached)


def from_csv(text: str) -> SmiOutput:
    """Read `nvidia-smi --query-gpu=… --format=csv`, whose first line names the columns."""
    rows = [
        [cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()
    ]
    names = [_key(re.sub(r"\[[^]]*\]", "", cell)) for cell in rows[0]]
    gpus: list[GpuFacts] = []
    for row in rows[1:]:
        facts = dict(zip(names, row, strict=False))
        facts["id"] = facts.get("pci_bus_id") or f"GPU {facts.get('index', len(gpus))}"
        gpus.append(facts)
    return SmiOutput(tuple(gpus), None)


def fact(gpu: GpuFacts, *endings: str) -> str:
    """Return the first fact whose path ends so; empty when there is none, or it is `N/A`."""
    for ending in endings:
        for path, value in gpu.items():
            if path == ending or path.endswith("/" + ending):
                return "" if value in ("N/A", "[N/A]", "[Not Supported]") else value
    return ""


def number(gpu: GpuFacts, *endings: str) -> float | None:
    """Return such a fact as a number, without its unit."""
    match = re.match(r"-?\d+(?:\.\d+)?", fact(gpu, *endings))
    return float(match[0]) if match else None
