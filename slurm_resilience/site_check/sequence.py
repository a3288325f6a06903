"""Run the checks of a site one after the other, each with a time limit.

A check that needs an earlier one which is wrong is skipped, so the first wrong line is the cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurm_resilience.clock import Clock
from slurm_resilience.errors import SresError
from slurm_resilience.site_check import judges, probes
from slurm_resilience.site_check.judges import Outcome, SiteJudgement, ok, skipped, wrong
from slurm_resilience.site_check.probes import Site

LIMIT_SECONDS = 15.0


@dataclass(frozen=True)
class SiteCheck:
    """One line of `sres check site`."""

    name: str
    look: Callable[[Site, Clock], SiteJudgement]
    """Probe and judge. What it raises as `SresError` is what is wrong."""
    needs: tuple[str, ...] = ()
    remedy: str = ""
    """The advice to give when the probe raises."""


def _config(site: Site, clock: Clock) -> SiteJudgement:
    site.config  # noqa: B018  reading it is the probe
    return ok("valid")


def _host(site: Site, clock: Clock) -> SiteJudgement:
    host = probes.controller_host(site)
    return ok(f"{host} is {', '.join(probes.resolve(host))}")


def _port(site: Site, clock: Clock) -> SiteJudgement:
    host = probes.controller_host(site)
    return judges.judge_port(probes.connect(host, site.config.controller.port))


def _controller(site: Site, clock: Clock) -> SiteJudgement:
    data = site.status()
    return judges.judge_controller(data, clock.now(), site.config.controller.interval)


CHECKS = (
    SiteCheck("config", _config, remedy="correct sres.toml, then sres check config"),
    SiteCheck("munge", lambda s, _: judges.judge_munge(probes.munge_round_trip(s)), ("config",)),
    SiteCheck(
        "slurm", lambda s, _: judges.judge_slurm(s.info), ("munge",), "see `scontrol ping` here"
    ),
    SiteCheck("plugin", lambda s, _: judges.judge_plugin(probes.plugin(s)), ("slurm",)),
    SiteCheck("supervisor", lambda s, _: judges.judge_supervisor(probes.plugin(s)), ("plugin",)),
    SiteCheck("expansion", lambda s, _: judges.judge_expansion(s.info), ("slurm",)),
    SiteCheck("accounting", lambda s, _: judges.judge_accounting(s.info), ("slurm",)),
    SiteCheck("settings", lambda s, _: judges.judge_settings(s.info), ("slurm",)),
    SiteCheck("prolog", lambda s, _: judges.judge_prolog_flags(s.info), ("slurm",)),
    SiteCheck("prolog hold", lambda s, _: judges.judge_prolog_hold(s.info), ("slurm",)),
    SiteCheck("host", _host, ("slurm",)),
    SiteCheck(
        "program", lambda s, _: judges.judge_program(probes.replacement_program(s)), ("host",)
    ),
    SiteCheck("port", _port, ("host",)),
    SiteCheck("sresctld", _controller, ("port",), "read sresctld's log"),
    SiteCheck("sresd", lambda s, _: judges.judge_nodes(*probes.connected_agents(s)), ("sresctld",)),
)
"""In the order of docs/install.md."""


def run(site: Site, clock: Clock) -> Iterator[tuple[SiteCheck, SiteJudgement]]:
    """Yield each check with its judgement as soon as it is there."""
    unusable: set[str] = set()
    for check in CHECKS:
        blocked = [name for name in check.needs if name in unusable]
        if blocked:
            judgement = skipped(f"{blocked[0]} comes first")
        else:
            judgement = _within_limit(check, site, clock)
        if blocked or judgement.outcome is Outcome.WRONG:
            unusable.add(check.name)
        yield check, judgement


def _within_limit(check: SiteCheck, site: Site, clock: Clock) -> SiteJudgement:
    seen: list[SiteJudgement] = []
    ended = threading.Event()

    def body() -> None:
        try:
            seen.append(check.look(site, clock))
        except SresError as error:
            seen.append(wrong(type(error), str(error), check.remedy))
        except Exception as error:
            seen.append(wrong(SresError, f"{type(error).__name__}: {error}", check.remedy))
        ended.set()

    # A probe that hangs in the kernel cannot be ended; as a daemon it does not hold up the exit.
    threading.Thread(target=body, name=f"check {check.name}", daemon=True).start()
    if not clock.wait(ended, LIMIT_SECONDS):
        return wrong(SresError, f"no answer within {LIMIT_SECONDS:g} s", check.remedy)
    return seen[0]
