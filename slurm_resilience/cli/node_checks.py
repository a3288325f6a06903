"""`sres check run`: have nodes run their health checks now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.shared_options import config_option, format_option, hostlist_argument
from slurm_resilience.errors import UsageError

if TYPE_CHECKING:
    from slurm_resilience.model import CheckResult

RUN_SECONDS = 60.0
"""Seconds that the checks of a node have together."""
GRACE_SECONDS = 5.0
"""Until its answer is here."""
AT_ONCE = 16
"""Nodes that are asked at the same time."""


class NodeChecks(NamedTuple):
    """A node's results; or why there are none."""

    results: tuple[CheckResult, ...]
    trouble: str = ""

    @property
    def has_failed(self) -> bool:
        return any(one.verdict == "fail" for one in self.results)


@click.command("run")
@hostlist_argument
@click.option("--only", metavar="CHECKS", help="Run only these checks: names, with commas.")
@format_option
@config_option
@pass_cluster
def run_checks(cluster: ClusterView, hostlist: str, only: str | None, form: str) -> None:
    """Run the health checks of nodes now. HOSTLIST is Slurm's: n1 or n[1-3,7].

    Each node's sresd runs them beside its jobs, those that take long by their names alone; `sres
    check list` shows the names. What they find counts as it always does. Only root and SlurmUser
    may. Exit with 1 if a check fails, or a node does not answer.
    """
    names = tuple(name for name in (only or "").replace(" ", "").split(",") if name)
    if only is not None and not names:
        raise UsageError("--only names no check; `sres check list` shows them")
    nodes = list(cluster.named(hostlist))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda node: _ask(cluster, node, names), nodes)
        told = dict(zip(nodes, answers, strict=True))
    if form == "json":
        _print_json(told)
    else:
        _print_table(told)
    if any(one.trouble or one.has_failed for one in told.values()):
        raise click.exceptions.Exit(1)


def _ask(cluster: ClusterView, node: str, names: tuple[str, ...]) -> NodeChecks:
    import msgspec

    from slurm_resilience.errors import NotPermitted, SresError
    from slurm_resilience.wire.frames import UNREADABLE
    from slurm_resilience.wire.messages import ChecksRun, RunChecks

    try:
        question = RunChecks(names, RUN_SECONDS)
        body = cluster.ask_node(node, RunChecks.kind, question, RUN_SECONDS + GRACE_SECONDS)
        return NodeChecks(msgspec.msgpack.decode(body, type=ChecksRun).results)
    except UNREADABLE as error:
        return NodeChecks((), f"sresd's answer cannot be read: {error}")
    except NotPermitted:
        raise  # it holds for all nodes
    except SresError as error:
        return NodeChecks((), str(error))


def _print_json(told: Mapping[str, NodeChecks]) -> None:
    import msgspec

    from slurm_resilience.cli.tables import print_json

    print_json(
        [
            {"node": node, "checks": msgspec.to_builtins(one.results), "trouble": one.trouble}
            for node, one in told.items()
        ]
    )


def _print_table(told: Mapping[str, NodeChecks]) -> None:
    from slurm_resilience.cli.tables import heading, table
    from slurm_resilience.slurm.hostlists import fold

    # Of a thousand nodes nearly all say the same: it is read once.
    words: dict[str, list[str]] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for node, one in told.items():
        said = one.trouble or _in_words(one.results)
        words.setdefault(said, []).append(node)
        for result in one.results:
            if result.verdict != "pass":
                row = (result.check, result.verdict, _asks(result), result.text)
                rows.setdefault(row, []).append(node)
    for said, nodes in words.items():
        click.echo(heading(f"{fold(nodes)}: {said}"))
    if rows:
        cells = [(fold(nodes), *row) for row, nodes in rows.items()]
        click.echo(table(("NODE", "CHECK", "RESULT", "ASKS FOR", "TEXT"), cells))


def _in_words(results: Iterable[CheckResult]) -> str:
    from slurm_resilience.cli.tables import count

    verdicts = [one.verdict for one in results]
    words = {"fail": "failed", "unjudged": "could not be judged"}
    told = [f"{verdicts.count(one)} {said}" for one, said in words.items() if one in verdicts]
    return f"{count(len(verdicts), 'check')} run, {' and '.join(told) or 'all passed'}"


def _asks(result: CheckResult) -> str:
    asked = dict.fromkeys(str(one.severity) for one in result.findings)
    return ", ".join(asked) or "-"
