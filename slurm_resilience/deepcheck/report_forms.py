"""Results in the forms that log parsers of HyperPod's deep checks read, to the letter. Pure.

``stamp`` is a moment as these logs write it: `2024-08-20T22:25:02Z`.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from slurm_resilience.deepcheck.collective_math import (
    Collective,
    Sweep,
    algorithm_bandwidth,
    average_bus_bandwidth,
    bus_bandwidth,
    wrong_elements,
)
from slurm_resilience.deepcheck.loopback_rounds import LoopbackFigures
from slurm_resilience.health.documents.dcgm_facts import DcgmFacts

_GAP = "    "


def log_line(stamp: str, level: str, text: str) -> str:
    """Return one line of the node's log."""
    return f"{stamp}{_GAP}{level}{_GAP}{text}"


def dcgm_summary(stamp: str, facts: DcgmFacts) -> str:
    """Return the summary of a DCGM diagnostic."""
    lines = (
        log_line(stamp, "info", "DCGM diagnostic health summary:"),
        f"  dcgmCheckLevel: {facts.level}",
        f"  dcgmVersion: {facts.version}",
        f"  gpuDriverVersion: {facts.driver}",
        f"  gpuDeviceIds: [{' '.join(facts.device_ids)}]",
        f"  replacementRequired: {str(facts.replacement_required).lower()}",
        f"  rebootRequired: {str(facts.reboot_required).lower()}",
    )
    return "\n".join(lines)


def loopback_summary(stamp: str, device: str, figures: LoopbackFigures, passed: bool) -> str:
    """Return the figures of one EFA device."""
    level, word = ("info", "passed") if passed else ("error", "failed")
    lines = (
        log_line(stamp, level, f"EFA Loopback check {word} for device: {device}"),
        f"  MaxBw: {figures.max_bw:.6f}",
        f"  AvgBw: {figures.avg_bw:.6f}",
        f"  MaxTypicalLat: {figures.max_typical_lat:.6f}",
        f"  MinTypicalLat: {figures.min_typical_lat:.6f}",
        f"  AvgLat: {figures.avg_lat:.6f}",
    )
    return "\n".join(lines)


_HEAD = """\
#       size         count      type   redop    root     time   algbw   busbw
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"""


def collective_table(sweep: Sweep) -> str:
    """Return a sweep as the table of nccl-tests, with its two last lines."""
    redop = "sum" if sweep.collective is Collective.ALL_REDUCE else "none"
    lines = [_HEAD]
    for row in sweep.rows:
        bus = bus_bandwidth(sweep.collective, sweep.ranks, row)
        lines.append(
            f"{row.size_bytes:12d}  {row.elements:12d}  {'float':>8}  {redop:>6}  {-1:6d}  "
            f"{_microseconds(row.seconds)}  {algorithm_bandwidth(row):6.2f}  {bus:6.2f}"
        )
    wrong = wrong_elements(sweep)
    lines.append(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    lines.append(f"# Avg bus bandwidth    : {average_bus_bandwidth(sweep):.6g}")
    return "\n".join(lines)


def _microseconds(seconds: float) -> str:
    """Return a time in seven characters, the larger the fewer digits, as nccl-tests does."""
    value = seconds * 1e6
    digits = 0 if value >= 10_000 else 1 if value >= 100 else 2
    return f"{value:7.{digits}f}"


class FaultyNodeLine(NamedTuple):
    """A node that the cluster level names."""

    node: str
    region: str
    instance_type: str
    threshold: float
    """GB/s."""
    bandwidth: float
    """GB/s."""


def faulty_line(stamp: str, faulty: FaultyNodeLine) -> str:
    """Return the JSON line of the cluster's log for a node that is too slow.

    ``node`` stands beside the three known keys: the text is left as parsers know it.
    """
    text = (
        f"Encountered FaultyInstance. Replace the Instance. Region: {faulty.region}, "
        f"InstanceType: {faulty.instance_type}. ERROR:Bandwidth has less than threshold: "
        f"Expected minimum threshold :{faulty.threshold:g},"
        f"NCCL Test output Bw: {faulty.bandwidth:g}"
    )
    return cluster_line(stamp, "error", text, node=faulty.node)


def cluster_line(stamp: str, level: str, text: str, **more: object) -> str:
    """Return a line of the cluster's log."""
    return json.dumps({"level": level, "ts": stamp, "msg": text, **more})
