"""`scripts/demo`: a lab of six nodes, a four-node training, a fault in the middle, and the account.

Exit status 0 only when training went on, the node came back, and the final parameters are
bit-equal to those of a run that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from slurm_resilience.controller.record import Journal
from slurm_resilience.demo.phases import NAMES, Account, Fault, account, complete
from slurm_resilience.errors import LabError, MissingTool, SresError
from slurm_resilience.lab import Lab, LabSpec

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "scripts" / "templates"
XID = "NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table"
VICTIM = "n3"
NODES, RANKS = 6, 4
LABELS = {
    "detected": "fault → detected",
    "marked": "… → node marked",
    "step_ended": "… → step ended",
    "nodes_ready": "… → nodes ready",
    "relaunched": "… → step relaunched",
    "first_step": "… → first optimizer step",
    "node_back": "fault → node replaced and idle",
}
TARGETS: dict[str, dict[str, float]] = {
    "power": {"first_step": 12.0},
    "rank": {"first_step": 12.0},
    "admin": {"node_back": 60.0},
    "xid": {"marked": 1.0},
}


class Demo:
    """One run of the main job on a lab."""

    def __init__(self, lab: Lab, fault: Fault, steps: int, pace: float, console: Console) -> None:
        self.lab = lab
        self.fault = fault
        self.steps = steps
        self.pace = pace
        self.console = console
        self.work = lab.directory / "demo"
        self.work.mkdir(mode=0o755)
        self.began = time.monotonic()
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """One line of the live account."""
        self.console.print(f"[dim]{time.monotonic() - self.began:6.1f} s[/dim]  {text}")

    def submit(self, name: str, flags: str, options: list[str]) -> int:
        """Submit a training; its job id."""
        folder = self.work / name
        folder.mkdir()
        script = folder / "train.sbatch"
        program = shlex.join([sys.executable, str(TEMPLATES / "train_ddp.py")])
        script.write_text(
            "#!/bin/bash\n"
            f"srun {flags} {program} --steps {self.steps}"
            f" --checkpoint-every 50 --pace {self.pace} --folder {folder}/checkpoints"
            f" --log {folder}/steps.jsonl\n"
        )
        words = ["sbatch", "--parsable", f"--nodes={RANKS}", "--ntasks-per-node=1", "--exclusive"]
        words += ["--requeue", "--open-mode=append", f"--output={folder}/log", *options]
        env = {
            "SRES_EVENTS": str(folder / "events.jsonl"),
            "OMP_NUM_THREADS": "1",
            # DDP warns on each rank that it found no unused parameter; that is on purpose.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        done = self.lab.run([*words, str(script)], cwd=folder, env=env, check=True)
        return int(done.stdout.strip().split(";")[0])

    def steps_done(self, name: str) -> list[dict[str, Any]]:
        """The training's own log, one entry a step."""
        return read_lines(self.work / name / "steps.jsonl")

    def wait(self, what: str, seconds: float, ready: Callable[[], bool], job: int = 0) -> None:
        """Wait with a deadline, telling what happens meanwhile.

        Raises:
            LabError: it did not come, with the last words of the job's log.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise LabError(f"{what}: not within {seconds:.0f} s; {self._tail()}")
            if job and not self.is_alive(job):
                if ready():
                    return
                raise LabError(f"{what}: job {job} has ended before; {self._tail()}")
            self.narrate()
            # The logs are files of other programs: nothing wakes us when they grow.
            time.sleep(0.1)

    def is_alive(self, job: int) -> bool:
        shown = self.lab.run(["squeue", "-h", "-j", str(job), "-o", "%T"])
        return shown.returncode == 0 and bool(shown.stdout.strip())

    def make_fault(self, job: int) -> float:
        """Break something; when, seconds since the epoch."""
        if self.fault == "power":
            at = time.time()
            self.lab.power_off(VICTIM)
        elif self.fault == "xid":
            at = time.time()
            self.lab.kmsg(VICTIM, XID)
        elif self.fault == "admin":
            at = time.time()
            self.lab.run(
                ["scontrol", "update", f"node={VICTIM}", "state=fail", "reason=Action:Replace"],
                check=True,
            )
        else:
            pid = self.lab.run(
                ["pgrep", "-f", f"^{sys.executable} .*train_ddp.py"], node=VICTIM, check=True
            )
            at = time.time()
            self.lab.run(["kill", "-9", pid.stdout.split()[0]], node=VICTIM, check=True)
        return at

    def journal(self) -> list[dict[str, Any]]:
        """sresctld's events, oldest first."""
        path = self.lab.directory / "ctl" / "sresctld" / "journal.db"
        journal = Journal(path)
        try:
            return journal.events(limit=1000)[::-1]
        finally:
            journal.close()

    def account(self, at: float) -> Account:
        return account(
            self.fault,
            at,
            VICTIM,
            self.journal(),
            read_lines(self.work / "main" / "events.jsonl"),
            self.steps_done("main"),
        )

    def narrate(self) -> None:
        """Tell each new event of sresctld and of the supervisor once."""
        for event in self.journal():
            where = event["node"] or (f"job {event['job']}" if event["job"] else "")
            self._tell(
                f"j{event['id']}",
                f"[bold]sresctld[/bold]   {where}: {event['kind']}: {event['text']}",
            )
        log = self.work / "main" / "log"
        for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
            if line.startswith("sres:"):
                self._tell(line, f"[bold]supervisor[/bold] {line.removeprefix('sres: ')}")

    def _tell(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.say(text)

    def _tail(self) -> str:
        logs = [self.work / "main" / "log", self.work / "undisturbed" / "log"]
        texts = [p.read_text(errors="replace")[-1500:] for p in logs if p.exists()]
        return "the job's log ends with:\n" + "\n".join(texts)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines; a last line that is still being written is left out."""
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1] if line]


def bit_equal(one: Path, other: Path) -> bool:
    """Are all parameters of two checkpoints the same, to the bit?"""
    import torch

    a, b = (torch.load(p, weights_only=True)["model"] for p in (one, other))
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def run(
    fault: Fault, gres: str, kill_controller: bool, steps: int, pace: float, console: Console
) -> dict[str, Any]:
    """The whole demo; what `--json` writes."""
    name = f"demo-{os.getpid()}"
    console.print(
        f"[bold]slurm-resilience[/bold]: fault [bold]{fault}[/bold]"
        f"{f' with GRES {gres}' if gres else ''}"
    )
    spec = LabSpec(nodes=NODES, network=True, gres=gres or None)
    with _interruptible(), Lab.up(spec, name=name) as lab:
        demo = Demo(lab, fault, steps, pace, console)
        demo.say(f"lab '{name}': {NODES} nodes idle, real Slurm, each node its own network")
        return _story(demo, gres, kill_controller)


def _story(demo: Demo, gres: str, kill_controller: bool) -> dict[str, Any]:
    options = [f"--gres={gres}"] if gres else []
    job = demo.submit("main", "--auto-resume=1", options)
    demo.say(
        f"job {job}: srun --auto-resume=1 train_ddp.py on {RANKS} nodes, checkpoint every 50 steps"
    )
    demo.wait("the first step", 90, lambda: bool(demo.steps_done("main")), job)
    demo.say("training runs")
    middle = demo.steps * 2 // 5
    demo.wait(f"step {middle}", 120, lambda: demo.steps_done("main")[-1]["step"] >= middle, job)
    last = demo.steps_done("main")[-1]
    at = demo.make_fault(job)
    what = {
        "power": f"{VICTIM} loses its power: cable first, no goodbye to anybody",
        "xid": f"{VICTIM}'s kernel log: {XID}",
        "admin": f"an administrator: scontrol update node={VICTIM} state=fail "
        "reason=Action:Replace",
        "rank": f"the rank on {VICTIM} is killed (SIGKILL); the node is healthy",
    }[demo.fault]
    demo.say(f"[bold red]FAULT[/bold red] at step {last['step']}: {what}")
    if kill_controller:
        _kill_controller(demo)
    demo.wait("the recovery", 180, lambda: complete(demo.account(at), demo.fault))
    seen = demo.account(at)
    demo.say(f"training goes on from step {seen.resumed_from}")
    final = demo.work / "main" / "checkpoints" / f"step-{demo.steps:08d}.pt"
    demo.wait("the end of the training", 180, final.exists, job)
    demo.wait("the end of the job", 30, lambda: not demo.is_alive(job))
    demo.narrate()
    seen = demo.account(at)
    demo.say("training is done; now the same from the same seed, undisturbed")
    twin = demo.submit("undisturbed", "", options)
    other = demo.work / "undisturbed" / "checkpoints" / final.name
    demo.wait("the undisturbed run", 240, other.exists, twin)
    states = demo.lab.node_states()
    result = {
        "fault": demo.fault,
        "gres": gres,
        "phases": seen.phases,
        "steps_lost": seen.steps_lost,
        "caught_up": seen.caught_up,
        "loss_before": seen.loss_before,
        "loss_after": seen.loss_after,
        "bit_equal": bit_equal(final, other),
        "nodes_marked": sorted(
            {e["node"] for e in demo.journal() if e["kind"] in ("marked", "detected")}
        ),
        "nodes_up": sum(state.split("+")[0] in ("IDLE", "ALLOCATED") for state in states.values()),
    }
    _print(demo, seen, result)
    return result


def _kill_controller(demo: Demo) -> None:
    """sresctld is killed in the middle of its work, and started again two seconds later."""
    demo.lab.kill_daemon("sresctld", signal.SIGKILL)
    demo.say("sresctld is killed (SIGKILL)")
    until = time.monotonic() + 2
    demo.wait("two seconds without sresctld", 10, lambda: time.monotonic() > until)
    demo.lab.start_daemon("sresctld")
    demo.say("sresctld is started again")


def _print(demo: Demo, seen: Account, result: dict[str, Any]) -> None:
    table = Table(title=f"Recovery from '{demo.fault}'", title_justify="left", min_width=60)
    table.add_column("phase")
    table.add_column("seconds since the fault", justify="right")
    table.add_column("target", justify="right")
    for name in NAMES:
        value = seen.phases[name]
        target = TARGETS[demo.fault].get(name)
        table.add_row(
            LABELS[name],
            "–" if value is None else f"{value:.2f}",
            "" if target is None else f"≤ {target:g}",
        )
    demo.console.print(table)
    caught = "not seen" if seen.caught_up is None else f"caught up after {seen.caught_up:.1f} s"
    demo.console.print(
        f"Steps lost since the last checkpoint: {seen.steps_lost} "
        f"(step {seen.last_step} → {seen.resumed_from}), {caught}"
    )
    if seen.loss_before is not None and seen.loss_after is not None:
        demo.console.print(
            f"Loss of step {seen.last_step}: {seen.loss_before:.6f} before, "
            f"{seen.loss_after:.6f} after"
        )
    verdict = (
        "[bold green]bit-equal[/bold green] to the undisturbed run"
        if result["bit_equal"]
        else "[bold red]DIFFERENT[/bold red] from the undisturbed run"
    )
    demo.console.print(f"Final parameters: {verdict}")
    demo.console.print(
        "Stock Slurm's defaults, measured for the same power loss: node marked "
        "after 396 s, job running again after 532 s",
        style="dim",
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the lab is taken down."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(name="demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--fault",
    type=click.Choice(["power", "xid", "admin", "rank"]),
    default="power",
    show_default=True,
    help="What goes wrong in mid-training.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result here.",
)
@click.option("--gres", default="", help="GRES of every node and the job, e.g. gpu:2.")
@click.option("--kill-sresctld", is_flag=True, help="Kill sresctld right after the fault.")
@click.option("--steps", default=300, show_default=True, help="Optimizer steps.")
@click.option("--pace", default=0.02, show_default=True, help="Least seconds a step takes.")
def command(
    fault: Fault, json_file: Path | None, gres: str, kill_sresctld: bool, steps: int, pace: float
) -> None:
    """A four-node training on a real Slurm of six nodes loses a node, and goes on."""
    if steps < 100:
        raise click.BadParameter("at least 100 steps, or there is no middle", param_hint="--steps")
    if json_file is not None and not os.access(json_file.resolve().parent, os.W_OK):
        raise click.BadParameter(f"{json_file.parent} cannot be written to", param_hint="--json")
    plugin = LabSpec(nodes=1).plugin_file()
    if plugin is None:
        raise MissingTool("spank/sres.so is not built; run make -C spank")
    console = Console(highlight=False, soft_wrap=True)
    result = run(fault, gres, kill_sresctld, steps, pace, console)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    if not result["bit_equal"]:
        raise SresError("the final parameters differ from the undisturbed run's")
    if fault == "rank" and result["nodes_marked"]:
        raise SresError(f"a healthy node was marked: {', '.join(result['nodes_marked'])}")
    if fault != "rank" and result["nodes_marked"] != [VICTIM]:
        raise SresError(f"marked were {result['nodes_marked']}, not [{VICTIM}] alone")


def main() -> None:
    """The entry: errors become one line and a code."""
    try:
        command(prog_name="scripts/demo", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print("demo: interrupted; the lab is taken down", file=sys.stderr)
        sys.exit(130)
    except SresError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
