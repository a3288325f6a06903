"""`scripts/demo`: a lab of six nodes, a four-node training, a fault in the middle, and the account.

Exit status 0 only when training went on, the node came back, and the final parameters are
bit-equal to those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from slurm_resilience.demo import checkpointless as checkpointless_demo
from slurm_resilience.demo.narration import NODES, RANKS, VICTIM, XID, Demo, interruptible
from slurm_resilience.demo.phase_table import STOCK_POWER_LOSS, phase_table
from slurm_resilience.demo.phases import Account, Fault, complete
from slurm_resilience.errors import MissingTool, SresError
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import VERSIONS, root_of

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


def bit_equal(one: Path, other: Path) -> bool:
    """Tell whether all parameters of two checkpoints are the same, to the bit."""
    import torch

    a, b = (torch.load(p, weights_only=True)["model"] for p in (one, other))
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def run(
    fault: Fault,
    gres: str,
    kill_controller: bool,
    steps: int,
    pace: float,
    undisturbed: Path | None,
    slurm_root: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Run the whole demo; return what `--json` writes."""
    name = f"demo-{os.getpid()}"
    console.print(
        f"[bold]slurm-resilience[/bold]: fault [bold]{fault}[/bold]"
        f"{f' with GRES {gres}' if gres else ''}"
    )
    spec = LabSpec(nodes=NODES, network=True, gres=gres or None, slurm_root=slurm_root)
    with interruptible(), Lab.up(spec, name=name) as lab:
        demo = Demo(lab, fault, steps, pace, console)
        demo.say(f"lab '{name}': {NODES} nodes idle, real Slurm, each node its own network")
        return _carry_out(demo, gres, kill_controller, undisturbed)


def _carry_out(
    demo: Demo, gres: str, kill_controller: bool, undisturbed: Path | None
) -> dict[str, Any]:
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
        "power": f"{VICTIM} loses its power: cable first, no goodbye",
        "xid": f"{VICTIM}'s kernel log: {XID}",
        "admin": f"an administrator: scontrol update node={VICTIM} state=fail "
        "reason=Action:Replace",
        "rank": f"the rank on {VICTIM} is killed (SIGKILL); the node is healthy",
    }[demo.fault]
    demo.say(f"at step {last['step']}: {what}", "FAULT")
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
    if undisturbed is not None and undisturbed.exists():
        other = undisturbed
        demo.say(f"training is done; the undisturbed run's end is in {undisturbed}")
    else:
        demo.say("training is done; now the same from the same seed, undisturbed")
        twin = demo.submit("undisturbed", "", options)
        other = demo.work / "undisturbed" / "checkpoints" / final.name
        demo.wait("the undisturbed run", 240, other.exists, twin)
        if undisturbed is not None:
            shutil.copyfile(other, undisturbed)
    states = demo.lab.node_states()
    result = {
        "fault": demo.fault,
        "gres": gres,
        "phases": seen.phases,
        "resumed_from": seen.resumed_from,
        "steps_lost": seen.steps_lost,
        "caught_up": seen.caught_up,
        "loss_before": seen.loss_before,
        "loss_after": seen.loss_after,
        "bit_equal": bit_equal(final, other),
        "nodes_marked": sorted(
            {e["node"] for e in demo.journal() if e["kind"] in ("detected", "marked", "requested")}
        ),
        "nodes_up": sum(state.split("+")[0] in ("IDLE", "ALLOCATED") for state in states.values()),
    }
    _print(demo, seen, result)
    return result


def _kill_controller(demo: Demo) -> None:
    """Kill sresctld in the middle of its work, and start it again two seconds later."""
    demo.lab.kill_daemon("sresctld", signal.SIGKILL)
    demo.say("sresctld is killed (SIGKILL)")
    until = time.monotonic() + 2
    demo.wait("two seconds without sresctld", 10, lambda: time.monotonic() > until)
    demo.lab.start_daemon("sresctld")
    demo.say("sresctld is started again")


def _print(demo: Demo, seen: Account, result: dict[str, Any]) -> None:
    title = f"Recovery from '{demo.fault}'"
    demo.console.print(phase_table(title, LABELS, seen.phases, TARGETS[demo.fault]))
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
    if demo.fault == "power":
        demo.console.print(STOCK_POWER_LOSS, style="dim")


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
@click.option(
    "--checkpointless",
    is_flag=True,
    help="The training uses slurm_resilience.training: the other ranks do not stop.",
)
@click.option(
    "--victim",
    type=click.Choice(["rank0", "rank2"]),
    default="rank2",
    show_default=True,
    help="With --checkpointless: whose node it is.",
)
@click.option(
    "--steps",
    type=int,
    help="Optimizer steps. [default: 300; 400 with --checkpointless]",
)
@click.option(
    "--pace",
    type=float,
    help="Least seconds a step takes. [default: 0.02; 0.05 with --checkpointless]",
)
@click.option(
    "--undisturbed",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The last checkpoint of an undisturbed run of as many steps: written, or taken if it is "
    "there.",
)
@click.option(
    "--slurm",
    envvar="SRES_TEST_SLURM",
    type=click.Choice(VERSIONS),
    help="Slurm release to run.  [default: the machine's own]",
)
def command(
    fault: Fault,
    json_file: Path | None,
    gres: str,
    kill_sresctld: bool,
    checkpointless: bool,
    victim: str,
    steps: int | None,
    pace: float | None,
    undisturbed: Path | None,
    slurm: str | None,
) -> None:
    """Train on four nodes of a real Slurm of six, lose a node, and go on."""
    if checkpointless and (fault != "power" or gres or kill_sresctld or undisturbed):
        raise click.UsageError("--checkpointless goes with --fault power, and with nothing else")
    steps = steps or (400 if checkpointless else 300)
    pace = pace if pace is not None else (0.05 if checkpointless else 0.02)
    if steps < 100:
        raise click.BadParameter("at least 100 steps, or there is no middle", param_hint="--steps")
    if json_file is not None and not os.access(json_file.resolve().parent, os.W_OK):
        raise click.BadParameter(f"{json_file.parent} cannot be written to", param_hint="--json")
    slurm_root = root_of(slurm) if slurm else None
    plugin = LabSpec(nodes=1, slurm_root=slurm_root).plugin_file()
    if plugin is None:
        how = f"scripts/slurm-root {slurm}" if slurm_root else "make -C spank"
        raise MissingTool(f"the SPANK plugin is not built; run {how}")
    console = Console(highlight=False, soft_wrap=True)
    if checkpointless:
        result = checkpointless_demo.run(victim, steps, pace, slurm_root, console)
    else:
        result = run(fault, gres, kill_sresctld, steps, pace, undisturbed, slurm_root, console)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    if checkpointless:
        checkpointless_demo.check(result)
        return
    if not result["bit_equal"]:
        raise SresError("the final parameters differ from the undisturbed run's")
    if fault == "rank" and result["nodes_marked"]:
        raise SresError(f"a healthy node was marked: {', '.join(result['nodes_marked'])}")
    if fault != "rank" and result["nodes_marked"] != [VICTIM]:
        raise SresError(f"marked were {result['nodes_marked']}, not [{VICTIM}] alone")


def main() -> None:
    """Run the entry: errors become one line and a code."""
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
