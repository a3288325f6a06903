"""Measure what sresctld costs on a large cluster, and how soon it reacts there.

A real slurmctld with N configured nodes (and no slurmd but one), sresctld as it is installed, and
one process that plays the sresds of all N nodes over real connections at the product's pace. First
nothing happens; then one node loses its power and is replaced by a program; then a twentieth of all
nodes fall silent within a second. Processor time and memory are those of sresctld and all its
children. The reaction is measured on a small cluster too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from slurm_resilience.config import BreakerSettings
from slurm_resilience.lab import Lab, LabSpec

HERE = Path(__file__).parent
HELPER = "n1"
"""The one node with a slurmd: its network is that of all played nodes."""
HELPERS_ADDRESS = "10.77.0.2"
PROBE_PORT = 6900
ROW = 250
SAMPLE_SECONDS = 0.25
READY_SECONDS = 300.0
SETTLE_SECONDS = 15.0
"""Until the first rounds, which write every node into the journal, are over."""
REACTION_SECONDS = 60.0
REPLACEMENT_SECONDS = 20.0
STORM_SECONDS = 25.0
SMALL_NODES = 100
LIMITS = {
    "cycle_cpu_s": 0.15,
    "storm_cycle_cpu_s": 1.0,
    "rss_mb": 300.0,
    "cpu_share": 0.10,
    "replacing_cpu_share": 0.30,
    "replaced_in_storm": 0.0,
}
console = Console(highlight=False)


def addresses_of(nodes: int) -> dict[str, str]:
    """Return the played nodes' addresses, which the helper's network has besides its own."""
    return {f"f{n + 1}": f"10.78.{n // ROW}.{n % ROW + 1}" for n in range(nodes)}


def node_line(nodes: int) -> str:
    """Return Slurm's configuration of the played nodes."""
    full, rest = divmod(nodes, ROW)
    rows = [f"10.78.{row}.[1-{ROW}]" for row in range(full)]
    rows += [f"10.78.{full}.[1-{rest}]"] if rest else []
    return (
        f"f[1-{nodes}] NodeAddr={','.join(rows)} Port={PROBE_PORT} CPUs=4 RealMemory=1000 "
        "State=UNKNOWN"
    )


class Site:
    """A lab, sresctld in it, and the played nodes."""

    def __init__(self, lab: Lab, nodes: int, place: Path) -> None:
        self.lab, self.place = lab, place
        self.addresses = addresses_of(nodes)
        self.rounds_file = place / "rounds"
        self._log = (place / "sresctld.log").open("w")
        self._played: subprocess.Popen[str] | None = None
        self._served: subprocess.Popen[str] | None = None
        self.process = psutil.Process()
        self.most_bytes = self.most_own_bytes = self.found_at = 0.0
        self._ended = threading.Event()

    def start(self) -> None:
        """Lay the network, start sresctld, and let all nodes speak to it."""
        self._ip(HELPER, ["route add local 10.78.0.0/16 dev lo"])
        self._ip("ctl", [f"route add 10.78.0.0/16 via {HELPERS_ADDRESS}"])
        self._in_service()
        # First, so that no node's slurmd seems to be missing.
        words = [sys.executable, str(HERE / "player.py")]
        self._played = self.lab.popen(
            words, node=HELPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self._write({"addresses": self.addresses, "probe_port": PROBE_PORT})
        words = [sys.executable, str(HERE / "served.py"), str(self.rounds_file)]
        self._served = self.lab.popen(words, stdout=self._log, stderr=self._log)
        self._wait("sresctld has done a round", lambda: bool(self.rounds()))
        self.process = psutil.Process(self._served.pid).children()[0]
        threading.Thread(target=self._weigh, daemon=True).start()
        console.print(f"  {len(self.addresses)} nodes connect …")
        self.ask({"do": "open", "nodes": list(self.addresses), "boot": "first"})
        self._wait("all are healthy", self._all_healthy)
        time.sleep(SETTLE_SECONDS)
        self.ask({"do": "count"})

    def stop(self) -> None:
        self._ended.set()
        for process in (self._played, self._served):
            if process is not None:
                process.terminate()
                process.wait(30)
        self._log.close()

    def _in_service(self) -> None:
        """Put the played nodes into service, though no slurmd of theirs ever registers."""
        every = f"nodename=f[1-{len(self.addresses)}]"
        for state in ("down", "resume"):
            words = ["scontrol", "update", every, f"state={state}", "reason=bench"]
            self.lab.run(words[:4] if state == "resume" else words, check=True)
        shown = self.lab.run(["sinfo", "-h", "-o", "%T %D"], check=True).stdout.split()
        console.print(f"  Slurm shows: {' '.join(shown)}")

    def _all_healthy(self) -> bool:
        return self.is_calm(self.rounds()[-1])

    def is_calm(self, found: dict[str, Any]) -> bool:
        """Tell whether a round found nothing: on a machine without time for us, nodes that are
        played fall silent by themselves."""
        says = f"{len(self.addresses) + 1} nodes: nothing to do"
        return str(found["says"]).startswith(says)

    def rounds(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the rounds of sresctld that began since then (epoch)."""
        if not self.rounds_file.exists():
            return []
        text = self.rounds_file.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [found for found in map(json.loads, lines) if found["at"] >= since]

    def _journal(self) -> contextlib.closing[sqlite3.Connection]:
        file = self.lab.directory / "ctl" / "sresctld" / "journal.db"
        return contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True))

    def events(self, kind: str, since: float = 0.0, node: str = "") -> list[float]:
        """Return when (epoch) such events were journaled."""
        with self._journal() as journal:
            found = journal.execute(
                "SELECT at FROM events WHERE kind = ? AND at >= ? AND (? = '' OR node = ?)",
                (kind, since, node, node),
            ).fetchall()
        return [float(at) for (at,) in found]

    def watch_faults(self, number: int, found: threading.Event) -> None:
        """Note when sresctld has found so many nodes dead."""
        deadline = time.time() + STORM_SECONDS
        while time.time() < deadline:
            with self._journal() as journal:
                (known,) = journal.execute("SELECT count(*) FROM faults").fetchone()
            if known >= number:
                self.found_at = time.time()
                found.set()
                return
            time.sleep(SAMPLE_SECONDS)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have the player do something, and return its answer."""
        self._write(order)
        assert self._played is not None and self._played.stdout is not None
        for line in self._played.stdout:
            said: dict[str, Any] = json.loads(line)
            if said.pop("done", False):
                return said
            console.print(f"  {said}")
        raise click.ClickException(f"the player has ended:\n{self.log()}")

    def reads(self, pyslurm: str) -> dict[str, Any]:
        """Return what one listing of all nodes and jobs costs, by each client."""
        words = [sys.executable, str(HERE / "reads.py")]
        env = {"PYTHONPATH": pyslurm} if pyslurm else {}
        found: dict[str, Any] = json.loads(self.lab.run(words, env=env, check=True).stdout)
        return found

    def silence(self, names: list[str]) -> float:
        """Switch nodes off: no beat, and no answer to anything; return when (epoch)."""
        routes = [f"route add blackhole {self.addresses[n]}/32 table local" for n in names]
        self._ip(HELPER, routes)
        return float(self.ask({"do": "silence", "nodes": names})["at"])

    def wait_for_event(self, kind: str, node: str, since: float) -> float:
        """Wait until an event of a node is in the journal, and return when it came (epoch)."""
        found: list[float] = []

        def look() -> bool:
            found.extend(self.events(kind, since, node))
            return bool(found)

        self._wait(f"{node} {kind}", look, REACTION_SECONDS)
        return found[0]

    def spent(self) -> float:
        """Return the processor time of sresctld, of the children that have ended and of those that
        live."""
        times = self.process.cpu_times()
        total = times.user + times.system + times.children_user + times.children_system
        for child in self.process.children(recursive=True):
            try:
                of_child = child.cpu_times()
                total += of_child.user + of_child.system
            except psutil.Error:
                continue  # it has ended, and counts among the others from now on
        return float(total)

    def share(self, seconds: float) -> float:
        """Return the share of one core that sresctld takes."""
        began, before = time.monotonic(), self.spent()
        time.sleep(seconds)
        return (self.spent() - before) / (time.monotonic() - began)

    def _weigh(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                family = [self.process, *self.process.children(recursive=True)]
            except psutil.Error:
                return
            own, *others = family
            # Between vfork and exec a command lives in sresctld's memory, and under its command
            # line: to weigh it then would count that memory twice. What has its own keeps it.
            line = _line(own)
            size = _pss_bytes(own)
            self.most_own_bytes = max(self.most_own_bytes, size)
            size += sum(_pss_bytes(other) for other in others if _line(other) != line)
            self.most_bytes = max(self.most_bytes, size)

    def log(self) -> str:
        """Return the end of what sresctld and the player said."""
        return "\n".join((self.place / "sresctld.log").read_text().splitlines()[-20:])

    def _write(self, order: dict[str, Any]) -> None:
        assert self._played is not None and self._played.stdin is not None
        self._played.stdin.write(json.dumps(order) + "\n")
        self._played.stdin.flush()

    def _ip(self, node: str, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        self.lab.run(["ip", "-batch", "-"], node=node, input=text, check=True)

    def _wait(self, what: str, seen: Callable[[], bool], seconds: float = READY_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            if time.monotonic() > deadline:
                last = self.rounds()[-1:]
                text = f"not within {seconds:g} s: {what}; last round {last}\n{self.log()}"
                raise click.ClickException(text)
            time.sleep(SAMPLE_SECONDS)


def _line(process: psutil.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _pss_bytes(process: psutil.Process) -> float:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    found = [line for line in text.splitlines() if line.startswith("Pss:")]
    return 1024 * float(found[0].split()[1]) if found else 0.0


def spec_of(nodes: int) -> LabSpec:
    """Return a lab with these nodes besides the helper, and sresctld with its own limits."""
    breaker = BreakerSettings()
    return LabSpec(
        nodes=1,
        network=True,
        daemons=False,
        plugin=None,
        lifecycle=None,
        options={"NodeName": node_line(nodes), "SlurmdTimeout": "0"},
        sres_options={
            "breaker": {name: getattr(breaker, name) for name in breaker.__struct_fields__},
            "replace": {"program": ["/bin/sleep", str(REPLACEMENT_SECONDS)], "silent_for": 5.0},
        },
    )


def sites(nodes: int) -> Iterator[Site]:
    """Yield one site, and end it."""
    with tempfile.TemporaryDirectory(prefix="sres-bench-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        console.print(f"{nodes} nodes: a lab starts …")
        name = f"controller-{nodes}-{os.getpid()}"
        with Lab.up(spec_of(nodes), name=name, tied=True) as lab:
            site = Site(lab, nodes, place)
            try:
                site.start()
                yield site
            finally:
                site.stop()


def react(site: Site) -> float:
    """Switch one node off, and return the seconds from its last sign until it is marked."""
    began = site.silence(["f1"])
    return site.wait_for_event("marked", "f1", began) - began


def measure_small(nodes: int) -> dict[str, Any]:
    """Measure the reaction of a small cluster."""
    result: dict[str, Any] = {}
    for site in sites(nodes):
        result = {"reaction_s_small": react(site), "small_nodes": nodes}
    return result


def measure(nodes: int, seconds: float, pyslurm: str) -> dict[str, Any]:
    """Measure everything on a cluster of so many nodes, pyslurm in a directory of its own."""
    result: dict[str, Any] = {"bench": "controller", "nodes": nodes}
    for site in sites(nodes):
        result |= _quiet(site, seconds)
        result |= site.reads(pyslurm)
        result |= _one_fault(site)
        result |= _storm(site)
        result["rss_mb"] = site.most_bytes / 1e6
        result["rss_mb_without_commands"] = site.most_own_bytes / 1e6
    return result


def _quiet(site: Site, seconds: float) -> dict[str, Any]:
    console.print(f"  nothing happens for {seconds:g} s …")
    reads = []
    for _ in range(3):
        began = time.monotonic()
        site.lab.run(["scontrol", "show", "node", "-a", "-d", "-o"], check=True)
        reads.append(time.monotonic() - began)
    since = time.time()
    share = site.share(seconds)
    rounds = site.rounds(since)
    played = site.ask({"do": "count"})
    costs = [one["cpu_s"] for one in rounds]
    return {
        "cpu_share": share,
        "cycle_cpu_s": statistics.mean(costs) if costs else None,
        "cycle_took_s": statistics.mean(one["took_s"] for one in rounds) if rounds else None,
        "cycles": len(costs),
        "cycles_disturbed": sum(not site.is_calm(one) for one in rounds),
        "cycles_cpu_share": sum(costs) / seconds,
        "table_read_s": statistics.median(reads),
        "beats_a_second": played["beats"] / seconds,
        "played_late": played["late"],
        "connections_lost": played["lost"],
    }


def _one_fault(site: Site) -> dict[str, Any]:
    console.print("  one node loses its power, and is replaced …")
    reaction = react(site)
    started = site.wait_for_event("replacing", "f1", 0.0)
    share = site.share(REPLACEMENT_SECONDS - 5)
    return {
        "reaction_s": reaction,
        "replacing_cpu_share": share,
        "replacing_cycles": len(site.rounds(started)),
    }


def _storm(site: Site) -> dict[str, Any]:
    names = list(site.addresses)[1:]
    fallen = names[-max(5, len(names) // 20) :]
    console.print(f"  {len(fallen)} nodes fall silent …")
    since = site.silence(fallen)
    found = threading.Event()
    threading.Thread(target=site.watch_faults, args=(len(fallen), found), daemon=True).start()
    share = site.share(STORM_SECONDS)
    rounds = site.rounds(since)
    return {
        "storm_nodes": len(fallen),
        "storm_cycle_cpu_s": max((one["cpu_s"] for one in rounds), default=None),
        "storm_cycles": len(rounds),
        "storm_cpu_share": share,
        "storm_all_found_dead_s": site.found_at - since if found.is_set() else None,
        "replaced_in_storm": len(site.events("replacing", since)),
        "marked_in_storm": len(site.events("marked", since)),
        "alarms_in_storm": len(site.events("alarm", since)),
        "storm_says": rounds[-1]["says"] if rounds else "",
    }


def report(result: dict[str, Any]) -> Table:
    """Return the result as a table."""
    table = Table(title=f"sresctld with {result['nodes']} nodes", title_justify="left")
    for name in ("figure", "value", "limit"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    limits: dict[str, float] = dict(LIMITS)
    if "reaction_s_small" in result:
        limits["reaction_s"] = 2 * result["reaction_s_small"] + result["table_read_s"]
    for key, value in result.items():
        if key in ("bench", "nodes"):
            continue
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        limit = limits.get(key)
        kept = ""
        if limit is not None:
            is_kept = value is not None and value <= limit
            kept = f"{limit:.3g} {'kept' if is_kept else 'BROKEN'}"
        table.add_row(key, shown, kept)
    return table


@click.command(help=__doc__)
@click.option("--nodes", default=10_000, show_default=True, type=click.IntRange(20, 60_000))
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(5))
@click.option("--pyslurm", default="", help="Its directory, if sresctld is not to read by it.")
@click.option(
    "--json", "output", type=click.Path(path_type=Path), help="Write the result here too."
)
def main(nodes: int, seconds: float, pyslurm: str, output: Path | None) -> None:
    small = measure_small(SMALL_NODES) if nodes > SMALL_NODES else {}
    result = measure(nodes, seconds, pyslurm) | small
    console.print(report(result))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
