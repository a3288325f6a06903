"""Latency and bandwidth of each EFA device with itself, by repeated rounds of fi_pingpong."""

from __future__ import annotations

import secrets

from slurm_resilience.deepcheck.deep_logs import stamp
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck, InstanceContext
from slurm_resilience.deepcheck.loopback_rounds import (
    LoopbackFigures,
    lagging_devices,
    loopback_figures,
)
from slurm_resilience.deepcheck.report_forms import loopback_summary
from slurm_resilience.deepcheck.tool_call import RunningTool, run_tool
from slurm_resilience.health.check import CheckContext, Unjudged
from slurm_resilience.health.checks.network import efa_devices
from slurm_resilience.health.documents.pingpong_text import PingpongRow, pingpong_rows
from slurm_resilience.model import Severity

ROUNDS = 20
ROUND_SECONDS = 30.0
"""Seconds for one round. Without a device to talk to, fi_pingpong waits for ever."""
FIRST_PORT, PORTS = 20_000, 12_000


def devices(context: CheckContext) -> tuple[str, ...]:
    """Return the names of the EFA devices, as the kernel has them."""
    found = []
    for device in sorted(context.path(efa_devices.ROOT).glob("*")):
        vendor, kind = device / "device" / "vendor", device / "device" / "device"
        try:
            is_efa = vendor.read_text("utf-8").strip() == efa_devices.AMAZON
            is_efa = is_efa and kind.read_text("utf-8").strip().startswith("0xefa")
        except OSError:
            continue
        if is_efa:
            found.append(device.name)
    return tuple(found)


def _run(context: InstanceContext) -> DeepResult:
    figures: dict[str, LoopbackFigures] = {}
    silent: dict[str, str] = {}
    printed = []
    for device in devices(context.checks):
        rounds, trouble = _measure(device)
        measured = loopback_figures(rounds)
        if measured is None:
            silent[device] = trouble or "no row of results"
        else:
            figures[device] = measured
    if not figures and not silent:
        raise Unjudged("the profile expects EFA devices, and the kernel shows none")
    lagging = lagging_devices(figures)
    now = stamp(context.clock.now())
    for device, one in figures.items():
        printed.append(loopback_summary(now, device, one, device not in lagging))
    faults = [
        f"{device}: {figures[device].avg_bw:.2f} MB/s, far below its siblings" for device in lagging
    ]
    faults += [f"{device}: {trouble}" for device, trouble in silent.items()]
    block = "\n".join(printed)
    if faults and figures:
        # The others measured something, so the tool works, and the fault is the device's.
        text = "; ".join(faults)
        return DeepResult("efa_loopback", DeepOutcome.FAILED, text, Severity.REBOOT, block=block)
    if faults:
        raise Unjudged("; ".join(faults))
    text = f"{len(figures)} EFA devices answered in {ROUNDS} rounds each"
    return DeepResult("efa_loopback", DeepOutcome.PASSED, text, block=block)


def _measure(device: str) -> tuple[list[tuple[PingpongRow, ...]], str]:
    """Return the rows of each round, and the first trouble, after which no round follows."""
    rounds: list[tuple[PingpongRow, ...]] = []
    for _ in range(ROUNDS):
        port = str(FIRST_PORT + secrets.randbelow(PORTS))
        words = ["fi_pingpong", "-p", "efa", "-e", "rdm", "-d", f"{device}-rdm", "-I", "100"]
        server = RunningTool([*words, "-S", "all", "-B", port])
        try:
            told = run_tool([*words, "-S", "all", "-P", port, "127.0.0.1"], ROUND_SECONDS)
        except Unjudged as reason:
            return rounds, str(reason)
        finally:
            server.kill()
        rows = pingpong_rows(told.out)
        if not rows:
            return rounds, " ".join(told.both.split())[:200] or f"exit code {told.code}"
        rounds.append(rows)
    return rounds, ""


def _no_device(context: InstanceContext) -> str:
    if context.checks.expected.profile.efa_devices or devices(context.checks):
        return ""
    return "the node has no EFA device, and the profile expects none"


EFA_LOOPBACK = InstanceCheck(
    "efa_loopback", _run, _no_device, about="latency and bandwidth of each EFA device (fi_pingpong)"
)
