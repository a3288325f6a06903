#!/usr/bin/env python3
"""Measure what sresd costs a node, and how soon a line of the kernel log reaches sresctld.

One node of a lab with stand-ins for eight GPUs (the tests' NVML library) and 32 EFA devices (a tree
below agent.sysroot), all checks at their default pace. First nothing happens on the node, and
sresd's processor time and memory are read, its children's included. Then lines are written to the
node's kernel log, and a server of sresctld's own kind notes when each is reported.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import psutil

from slurm_resilience import config
from slurm_resilience.health.checks.network import efa_devices
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.wire.messages import Hello, Message, Report
from slurm_resilience.wire.server import Client, Server

REPOSITORY = Path(__file__).resolve().parents[2]
STUB = REPOSITORY / "tests" / "support" / "nvml_stub.c"
SRESD = Path(sys.executable).parent / "sresd"
NODE = "n1"
GPUS, EFA_DEVICES = 8, 32
SAMPLE_SECONDS = 0.25
LINE_SECONDS = 0.05
START_SECONDS = 60.0
ARRIVAL_SECONDS = 10.0
LINE = "NVRM: Xid (PCI:{subject}): 92, pid=1, name=x, High single-bit ECC error rate"
LIMITS = {"cpu_share": 0.005, "rss_mb": 60.0, "kernel_line_to_report_p99_s": 0.1}


class Listener:
    """Print when each finding and each result arrived: one JSON line each."""

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        return ()

    def opened(self, peer: Client) -> None:
        return

    def received(self, peer: Client, message: Message) -> None:
        if not isinstance(message, Report):
            return
        now = time.monotonic()
        for finding in message.findings:
            print(json.dumps({"subject": finding.subject, "at": now}))
        for result in message.results:
            print(json.dumps({"check": result.check, "verdict": result.verdict}))
        sys.stdout.flush()

    def closed(self, peer: Client) -> None:
        return


def listen() -> None:
    """Serve sresd, as sresctld does."""
    settings = config.load()
    server = Server(
        Listener(),
        settings.controller.port,
        munge_socket=settings.wire.munge_socket,
        # A report that comes when a beat is due may rest until the next one.
        beats=lambda clients: None,
        beat_seconds=settings.agent.beat,
    )
    server.start()
    threading.Event().wait()


class Heard:
    """All that the listener printed."""

    def __init__(self, lab: Lab) -> None:
        words = [sys.executable, __file__, "--listen"]
        self.process = lab.popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.arrived: dict[str, float] = {}
        self.verdicts: dict[str, str] = {}
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            said = json.loads(text)
            if "subject" in said:
                self.arrived.setdefault(said["subject"], said["at"])
            else:
                self.verdicts[said["check"]] = said["verdict"]


def measure(seconds: float, lines: int) -> dict[str, Any]:
    """Start a lab with one node and its sresd, and return what `report` prints."""
    with tempfile.TemporaryDirectory(prefix="sres-bench-") as name:
        place = Path(name)
        place.chmod(0o755)
        lay_out(place)
        spec = LabSpec(
            nodes=1,
            gres=f"gpu:{GPUS}",
            network=True,
            daemons=False,
            plugin=None,
            lifecycle=None,
            sres_options={
                "agent": {"sysroot": str(place / "root"), "health_log": str(place / "health")},
                "checks": {"profile": str(place / "profile.toml")},
            },
        )
        with Lab.up(spec, name=f"agent-{os.getpid()}") as lab:
            return _measure(lab, place, seconds, lines)


def lay_out(place: Path) -> None:
    """Make the stand-ins: the machine's own tree, with GPUs and EFA devices on it."""
    words = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(place / "libnvidia-ml.so.1"), str(STUB)]
    subprocess.run(words, check=True)
    (place / "libcuda.so.1").write_bytes((place / "libnvidia-ml.so.1").read_bytes())
    (place / "driver").mkdir()
    (place / "driver" / "state").write_text(f"count={GPUS}\nlinks=18\n", encoding="utf-8")
    profile = f"gpus = {GPUS}\nnvlinks = 18\npcie_width = 16\nefa_devices = {EFA_DEVICES}\n"
    (place / "profile.toml").write_text(profile, encoding="utf-8")
    root = place / "root"
    files: dict[str, object] = {}
    for number in range(GPUS):
        device = f"sys/bus/pci/devices/0000:{number + 1:02x}:00.0"
        files |= {f"{device}/vendor": "0x10de", f"{device}/class": "0x030200"}
        for kind, total in (("fatal", "FATAL"), ("nonfatal", "NONFATAL"), ("correctable", "COR")):
            files[f"{device}/aer_dev_{kind}"] = f"TOTAL_ERR_{total} 0"
    for number in range(EFA_DEVICES):
        device = f"sys/class/infiniband/rdmap{number}s0"
        files |= {f"{device}/device/vendor": "0x1d0f", f"{device}/device/device": "0xefa2"}
        files |= {
            f"{device}/ports/1/state": "4: ACTIVE",
            f"{device}/ports/1/phys_state": "5: LinkUp",
            f"{device}/ports/1/rate": "100 Gb/sec (4X EDR)",
        }
        files |= {f"{device}/hw_counters/{name}": 0 for name in ("no_completion_cmds", "cmds_err")}
        names = [name for name in efa_devices.LIMITS if name != "cmds_err"]
        files |= {f"{device}/ports/1/hw_counters/{name}": 0 for name in names}
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n", encoding="utf-8")
    for name in ("proc", "etc", "tmp", "var", "run"):
        (root / name).symlink_to(f"/{name}")


def _measure(lab: Lab, place: Path, seconds: float, lines: int) -> dict[str, Any]:
    heard = Heard(lab)
    env = {"NVML_STUB": str(place / "driver" / "state"), "LD_LIBRARY_PATH": str(place)}
    with (place / "sresd.log").open("w") as log:
        started = lab.popen([str(SRESD), "--node", NODE], node=NODE, stderr=log, env=env)
    try:
        sresd = _find(place)
        _wait(lambda: "nhc_config" in heard.verdicts and "gpu_events" in heard.verdicts, place)
        alive = len(_family(sresd))
        cpu, memory = _cost(sresd, seconds)
        delays = _delays(lab, heard, lines)
    finally:
        started.terminate()
        started.wait(20)
        heard.process.kill()
        heard.process.wait()
    delays.sort()
    return {
        "bench": "agent",
        "seconds": seconds,
        "gpus": GPUS,
        "efa_devices": EFA_DEVICES,
        "cpu_share": cpu,
        "rss_mb": memory,
        "processes": alive,
        "lines": lines,
        "lines_lost": lines - len(delays),
        "kernel_line_to_report_p50_s": statistics.median(delays) if delays else None,
        "kernel_line_to_report_p99_s": delays[int(len(delays) * 0.99)] if delays else None,
        "verdicts": dict(sorted(heard.verdicts.items())),
    }


def _find(place: Path) -> psutil.Process:
    """Return sresd's process, which entering the node put behind another one."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                state = str(place / "driver" / "state")
                if str(SRESD) in words[1:2] and process.environ().get("NVML_STUB") == state:
                    found.append(process)
            except psutil.Error:
                continue  # it has ended meanwhile
        return bool(found)

    _wait(look, place)
    return found[0]


def _wait(seen: Any, place: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not seen():
        if time.monotonic() > deadline:
            log = (place / "sresd.log").read_text(encoding="utf-8")
            raise click.ClickException(f"sresd is not ready after {START_SECONDS:g} s:\n{log}")
        time.sleep(SAMPLE_SECONDS)


def _cost(sresd: psutil.Process, seconds: float) -> tuple[float, float]:
    """Return the share of one core, and the most memory (PSS, MB) that sresd and its children held
    at one moment."""
    began, before, most = time.monotonic(), _processor_seconds(sresd), 0.0
    while time.monotonic() - began < seconds:
        most = max(most, sum(map(_pss_bytes, _family(sresd))) / 1e6)
        time.sleep(SAMPLE_SECONDS)
    return (_processor_seconds(sresd) - before) / (time.monotonic() - began), most


def _family(sresd: psutil.Process) -> list[psutil.Process]:
    return [sresd, *sresd.children(recursive=True)]


def _processor_seconds(sresd: psutil.Process) -> float:
    """Return the time of sresd, of the children that have ended, and of those that live."""
    times = sresd.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in sresd.children(recursive=True):
        try:
            of_child = child.cpu_times()
            total += of_child.user + of_child.system
        except psutil.Error:
            continue  # it has ended, and counts among the others from now on
    return float(total)


def _pss_bytes(process: psutil.Process) -> float:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return 1024 * float(
        next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]
    )


def _delays(lab: Lab, heard: Heard, lines: int) -> list[float]:
    """Write lines, each of another GPU, and return how long each took to be reported."""
    written: dict[str, float] = {}
    for number in range(lines):
        subject = f"{number >> 8:04x}:{number & 255:02x}:00"
        written[subject] = time.monotonic()
        lab.kmsg(NODE, LINE.format(subject=subject))
        time.sleep(LINE_SECONDS)
    deadline = time.monotonic() + ARRIVAL_SECONDS
    while not set(written) <= set(heard.arrived) and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    return [heard.arrived[key] - at for key, at in written.items() if key in heard.arrived]


def report(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [
        f"sresd with {GPUS} GPUs and {EFA_DEVICES} EFA devices, {result['seconds']:g} s, then "
        f"{result['lines']} lines of the kernel log ({result['lines_lost']} lost):"
    ]
    for key, text in (
        ("cpu_share", "share of one core"),
        ("rss_mb", "most memory (PSS, with children), MB"),
        ("kernel_line_to_report_p50_s", "kernel line to report, median, s"),
        ("kernel_line_to_report_p99_s", "kernel line to report, 99 %, s"),
    ):
        limit = LIMITS.get(key)
        value = result[key]
        kept = "" if limit is None else f"    limit {limit:g}: "
        if limit is not None:
            kept += "kept" if value is not None and value <= limit else "broken"
        lines.append(f"  {text:40}{value if value is None else format(value, '.4f'):>10}{kept}")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--seconds", default=300.0, show_default=True, type=click.FloatRange(5))
@click.option("--lines", default=1000, show_default=True, type=click.IntRange(1, 65536))
@click.option(
    "--json", "output", type=click.Path(path_type=Path), help="Write the result here too."
)
@click.option("--listen", "serve", is_flag=True, hidden=True)
def main(seconds: float, lines: int, output: Path | None, serve: bool) -> None:
    if serve:
        listen()
        return
    result = measure(seconds, lines)
    click.echo(report(result))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
