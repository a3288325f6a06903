"""`sres check`: find what is wrong in the configuration, in the installation, and on nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.node_checks import run_checks
from slurm_resilience.cli.shared_options import config_option, format_option
from slurm_resilience.errors import ConfigError, SresError

if TYPE_CHECKING:
    from slurm_resilience.site_check.judges import SiteJudgement
    from slurm_resilience.site_check.sequence import SiteCheck


@click.group()
def check() -> None:
    """Check the configuration, the whole installation, or nodes."""


@check.command("config")
@click.argument("file", required=False)
@config_option
@pass_cluster
def check_config(cluster: ClusterView, file: str | None) -> None:
    """Check a configuration file.

    Reads FILE, or the file in use, and prints `ok` or what is wrong in it.
    """
    from slurm_resilience.config import DEFAULT_PATH
    from slurm_resilience.controller.decide.recovery_modes import with_each_node
    from slurm_resilience.health.check_registry import refuse_unknown_names

    cluster.config_path = cluster.config_path if file is None else file
    with_each_node(cluster.config)
    _refuse_missing_program(cluster)
    _refuse_forgeries(cluster)
    refuse_unknown_names(cluster.config.checks)
    if cluster.config.checks.profile:
        from slurm_resilience.health.profile_files import load_profile

        load_profile(cluster.config.checks.profile)
    named = cluster.config_path or os.environ.get("SRES_CONFIG")
    if named or DEFAULT_PATH.exists():
        click.echo(f"{named or DEFAULT_PATH}: ok")
    else:
        click.echo(f"ok: there is no {DEFAULT_PATH}, so every default holds")


def _refuse_missing_program(cluster: ClusterView) -> None:
    """Only sresctld's machine needs the program. Unknown, that machine is taken for this one."""
    from slurm_resilience.replace.replacers import check_names_of_replacers
    from slurm_resilience.site_check.probes import program_fault, replacement_program

    check_names_of_replacers(cluster.config.replace)
    program = cluster.config.replace.program
    if not program:
        return
    try:
        fault = replacement_program(cluster).fault
    except SresError:
        fault = program_fault(program[0])
    if fault:
        raise ConfigError(f"replace.program: {fault}")


def _refuse_forgeries(cluster: ClusterView) -> None:
    """Refuse what sresctld would not start with, where its own machine is asked by its users."""
    from slurm_resilience.config import chosen_file
    from slurm_resilience.site_check.probes import replacement_program
    from slurm_resilience.trusted_paths import refuse_forged_controller

    try:
        if not (cluster.is_privileged and replacement_program(cluster).is_here):
            return
    except SresError:
        return  # Slurm is away: whose machine this is cannot be told
    file = chosen_file(cluster.config_path)
    refuse_forged_controller(cluster.config, file, frozenset({0, cluster.info.slurm_user_uid}))


@check.command("site")
@format_option
@config_option
@pass_cluster
def check_site(cluster: ClusterView, form: str) -> None:
    """Check the installation, step by step.

    Run it as root on sresctld's machine, on a login node and on a compute node: each looks at its
    own files, and at sresctld. The first thing that is wrong is named at the end, and gives the
    exit code.
    """
    from slurm_resilience.cli.tables import print_json, table
    from slurm_resilience.clock import SystemClock
    from slurm_resilience.site_check.judges import Outcome
    from slurm_resilience.site_check.sequence import run

    results = list(run(cluster, SystemClock()))
    first = next(((c, j) for c, j in results if j.outcome is Outcome.WRONG), None)
    if form == "json":
        print_json(_as_data(results, first))
    else:
        rows = [(c.name, j.outcome.value, _with_remedy(j)) for c, j in results]
        click.echo(table(("CHECK", "RESULT", "TEXT"), rows))
    if first is not None:
        check, judgement = first
        raise judgement.error(f"{check.name}: {_with_remedy(judgement)}")


def _with_remedy(judgement: SiteJudgement) -> str:
    return f"{judgement.text}. To do: {judgement.remedy}" if judgement.remedy else judgement.text


def _as_data(
    results: list[tuple[SiteCheck, SiteJudgement]],
    first: tuple[SiteCheck, SiteJudgement] | None,
) -> dict[str, Any]:
    return {
        "checks": [
            {"check": c.name, "result": j.outcome.value, "text": j.text, "remedy": j.remedy}
            for c, j in results
        ],
        "first_wrong": first[0].name if first else None,
        "exit_code": first[1].error.exit_code if first else 0,
    }


check.add_command(run_checks)


@check.command("list")
@format_option
def list_checks(form: str) -> None:
    """List the health checks and the kernel lines that are known."""
    from slurm_resilience.cli.tables import print_json, table
    from slurm_resilience.health.coverage import coverage_rows

    rows = coverage_rows()
    if form == "json":
        print_json([row._asdict() for row in rows])
    else:
        cells = [(row.words[0], row.gravest, row.words[1]) for row in rows]
        click.echo(table(("CHECK", "AT MOST", "TEXT"), cells))


@check.command("profile")
@click.argument("profile", required=False)
@click.option("--learn", is_flag=True, help="Look at this node, which has to be well.")
@config_option
@pass_cluster
def show_profile(cluster: ClusterView, profile: str | None, learn: bool) -> None:
    """Print the hardware that a node should have, as TOML.

    PROFILE is a node type or a file; without it, the node types that are known are listed. With
    --learn the profile is that of this node: save it, and name the file in checks.profile.
    """
    from pathlib import Path

    from slurm_resilience.errors import NotFound, UsageError
    from slurm_resilience.health import learn_profile, profile_files
    from slurm_resilience.health.check import CheckContext

    if learn and profile:
        raise UsageError("--learn looks at this node: name no profile beside it")
    if not learn and profile is None:
        click.echo("\n".join(profile_files.shipped_profiles()))
        return
    if profile is not None:
        click.echo(learn_profile.as_toml(profile_files.load_profile(profile)))
        return
    settings = cluster.config
    learned, findings = learn_profile.learn(
        CheckContext(Path(settings.agent.sysroot), settings.checks)
    )
    if findings:
        raise UsageError(f"this node is not well, so it is no model: {findings[0].text}")
    text = learn_profile.as_toml(learned)
    if not text:
        raise NotFound(
            "this node has no GPU, Neuron or EFA device and no port that a profile names"
        )
    click.echo(text)
