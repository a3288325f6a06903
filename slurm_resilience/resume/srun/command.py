"""From the user's srun line to the srun of an attempt: which nodes, which options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_resilience.errors import UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume import report
from slurm_resilience.resume.progress.step_report import VARIABLE as STEPS_VARIABLE
from slurm_resilience.resume.srun import env_option
from slurm_resilience.resume.srun.environment import wrapped
from slurm_resilience.resume.srun.quiet_lines import talking
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.totals import cut_command, cut_environment
from slurm_resilience.slurm.hostlists import expand, fold

GUARD = "SRES_SUPERVISED"
BY_PLUGIN = "1"
"""Its value: this srun is supervised. Where it is our child, our process's number stands there."""
REPORT_TO = "SLURM_SPANK__SLURM_SPANK_OPTION_sres_sres_report"
"""By this srun takes the plugin's option --sres-report from its environment."""
PLACEMENT = ("nodelist", "exclude", "nodefile", "relative", "nodes")
"""Options that choose nodes: after an exchange they name some that are gone."""


class AttemptCommand:
    """Build srun's command line, by the way in which this site's srun gives variables to tasks."""

    def __init__(
        self,
        srun: str,
        has_plugin: bool,
        step_size: int = 0,
        find_plugin: Callable[[], bool | None] = lambda: True,
    ) -> None:
        """
        Args:
            srun: path of the real srun.
            has_plugin: it carries our SPANK plugin, which sets the tasks' variables.
            find_plugin: looks whether it still does; None: srun does not tell.
            step_size: nodes for which the user's numbers of tasks and GPUs are meant; 0: they are
                not cut.
        """
        self._step_size = step_size
        self._srun = srun
        self._has_plugin = has_plugin
        self._find_plugin = find_plugin

    def on_fewer(
        self, command: SrunCommand, environment: Mapping[str, str], count: int
    ) -> tuple[SrunCommand, dict[str, str]]:
        """Return the command and environment with as many tasks on each node, but fewer nodes."""
        if count >= self._step_size:
            return command, dict(environment)
        cut = cut_environment(environment, self._step_size, count)
        return cut_command(command, self._step_size, count), dict(environment) | cut

    def look_again(self) -> None:
        """Do without the plugin from now on if srun has lost it: a job runs for weeks, in which
        Slurm is updated or the plugin installed anew. srun would refuse the plugin's options."""
        if self._has_plugin and self._find_plugin() is False:
            self._has_plugin = False
            report.say("srun has no plugin that fits any more: the step is started without it")

    @property
    def srun(self) -> str:
        """Return the path of the real srun."""
        return self._srun

    @property
    def has_plugin(self) -> bool:
        return self._has_plugin

    def line(
        self,
        command: SrunCommand,
        variables: Mapping[str, str],
        environment: Mapping[str, str],
        report_to: str = "",
    ) -> tuple[list[str], dict[str, str]]:
        """Return srun's words, and its environment.

        Args:
            command: the user's, with the options of this attempt.
            variables: for each task.
            environment: srun's own so far.
            report_to: where slurmstepd tells how tasks end; empty: nowhere. A secret, so it is no
                word of a command line, which every user may read.
        """
        command = talking(command)
        # srun's own defaults, and what it hands on with --export=ALL.
        env = dict(environment) | {
            name: value
            for name, value in variables.items()
            if not value.startswith("@") and not name.startswith("@")
        }
        # What has the token could tell steps in the program's name.
        open_to_all = {name: v for name, v in variables.items() if name != STEPS_VARIABLE}
        if len(open_to_all) < len(variables):
            command = _exporting(command, env, STEPS_VARIABLE)
        if self._has_plugin:
            env[GUARD] = BY_PLUGIN
            if report_to:
                env[REPORT_TO] = report_to
            words = [f"{env_option.OPTION}={env_option.option_value(open_to_all)}", *command.argv]
        else:
            words = list(_without_plugin(command, open_to_all).argv)
        return [self._srun, *words], env


def step_nodes(
    command: SrunCommand, job: Job, environment: Mapping[str, str]
) -> tuple[int, tuple[str, ...]]:
    """Return the number of nodes that the step uses, and the nodes.

    Raises:
        UsageError: a -w that is no hostlist, or no node is left.
    """
    chosen = command.value("nodelist")
    named = expand(chosen) if chosen and "/" not in chosen else ()
    count = leading_number(command.value("nodes")) or leading_number(
        environment.get("SLURM_NNODES", "")
    )
    count = min(count or len(job.nodes), len(job.nodes))
    tasks = leading_number(command.value("ntasks"))
    if tasks and not command.has("nodes"):
        count = min(count, tasks)
    if named:
        unknown = [name for name in named if name not in job.nodes]
        if unknown:
            raise UsageError(f"--nodelist: {fold(unknown)} is not in job {job.id}")
        count = max(count, len(named)) if command.has("nodes") else len(named)
    excluded = command.value("exclude")
    left = [n for n in job.nodes if not excluded or n not in expand(excluded)]
    others = [n for n in left if n not in named]
    nodes = (*named, *others)[:count]
    if not nodes:
        raise UsageError(f"--exclude={excluded}: it leaves no node of job {job.id}")
    return len(nodes), nodes


def tasks_by_node(command: SrunCommand, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the node of each task, where the user has laid them out by -w; else none. Pure."""
    layout = command.value("distribution") or environment.get("SLURM_DISTRIBUTION", "")
    listed = command.value("nodelist") or ""
    if not layout.startswith("arbitrary") or not listed or "/" in listed:
        return ()
    # A hostlist as a set would forget how often a node stands in it.
    parts = re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", listed)
    return tuple(name for part in parts for name in expand(part))


def leading_number(text: str | None) -> int:
    """Return the number of ``4``, the larger one of ``2-4``; 0 for anything else."""
    digits = (text or "").split("-")[-1]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _exporting(command: SrunCommand, environment: Mapping[str, str], name: str) -> SrunCommand:
    """Return a command that hands a variable of srun's own on to the tasks, whatever else it hands
    on: each user may read a command line, and an environment only its own.

    Args:
        command: the user's.
        environment: of srun.
        name: of the variable.
    """
    chosen = command.value("export") or environment.get("SLURM_EXPORT_ENV", "")
    words = chosen.upper().split(",")
    if not chosen or "ALL" in words:
        return command
    kept = "" if words[0] in ("NONE", "NIL") else f"{chosen},"
    return command.without("export").adding(f"--export={kept}{name}")


def _without_plugin(command: SrunCommand, variables: Mapping[str, str]) -> SrunCommand:
    """Return the user's program behind a shell that exports the variables."""
    if command.multi_prog or not command.program:
        if command.multi_prog:
            report.say(
                "without the SPANK plugin --multi-prog tasks get no NODE_RANK and no SLURM_NODE"
            )
        return command
    if command.program[0].startswith("-"):
        raise UsageError(f"{command.program[0]}: write ./{command.program[0]} or its whole path")
    named = command
    if not command.has("job-name"):
        named = command.adding(f"--job-name={Path(command.program[0]).name}")
    return SrunCommand(named.options, wrapped(command.program, variables))
