"""`sres`: the administrator's and the researcher's command.

Commands are imported when they are called: `sres run` stands before every training step, and must
not wait for what it does not use.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from slurm_resilience import __version__
from slurm_resilience.child_exits import keep_exit_codes
from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.shared_options import config_option
from slurm_resilience.errors import SresError, UsageError

_COMMANDS = {
    "breaker": ("orders.breaker_commands:breaker", "Show the breaker, or reset it."),
    "check": (
        "check_commands:check",
        "Check the configuration, the whole installation, or nodes.",
    ),
    "deepcheck": (
        "deepcheck.deepcheck_commands:deepcheck",
        "Load nodes and the links between them, as jobs, and judge them.",
    ),
    "drill": ("drill.drill_commands:drill", "Let injected faults count on a node for a while."),
    "events": ("past.event_commands:events", "List the journal's events, by what you look for."),
    "evidence": (
        "past.evidence_command:save_evidence",
        "Save a node's logs, findings and the state of its GPUs.",
    ),
    "explain": (
        "offline.explain_command:explain_path",
        "Name the cause of a failure from a job's log, of a hang from its dumps.",
    ),
    "incident": ("past.incident_commands:incident", "List incidents, or show one from end to end."),
    "inject": ("drill.inject_command:inject", "Let a fault happen to a node, as a drill."),
    "job": ("job_commands:job", "Show and resize jobs that run under srun --auto-resume=1."),
    "lab": ("lab:lab", "Run a real Slurm cluster on this machine, whose power can be cut."),
    "lifecycle": (
        "joining.lifecycle_commands:lifecycle",
        "Run the scripts that a node runs before it joins.",
    ),
    "node": ("node_commands:node", "List, replace, reboot and watch nodes."),
    "pause": ("orders.pause:pause", "Stop sresctld from acting until further notice."),
    "replay": ("offline.replay_commands:replay_file", "Judge a saved log or a tool's output."),
    "review": (
        "past.review_command:review",
        "Compare what sresctld would have done (mode observe) with what people did.",
    ),
    "run": ("run:run", "Keep a step alive: sres run -- srun [options] program."),
    "simulate": ("simulate:simulate", "Run simulated trainings under faults."),
    "spares": ("orders.spares_commands:spares", "Show spare nodes, or go on with held pools."),
    "status": ("cluster_status:status", "Show nodes, what is under way, and alarms."),
    "unpause": ("orders.pause:unpause", "Let sresctld act again."),
    "version": ("main:version", "Show the version."),
}
"""Name → (module:attribute below this package, one line of help)."""

MAX_WORD = 300
"""Characters of a word in an error: a path may have so many."""
_BROKEN_PIPE = 141  # what the shell shows for a program that SIGPIPE ended


class _Lazy(click.Group):
    """A group whose commands are imported when called; `--help` needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(f"slurm_resilience.cli.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@click.version_option(__version__, prog_name="slurm-resilience", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Keep training runs alive on Slurm: find broken nodes, have them replaced, resume steps.

    Begin with `sres status`; after an installation, with `sres check site`.
    """
    ctx.ensure_object(ClusterView)


@click.command()
def version() -> None:
    """Show the version."""
    click.echo(f"slurm-resilience {__version__}")


def call(args: list[str] | None = None, cluster: ClusterView | None = None) -> int:
    """Run one command line; what goes wrong is one line on stderr, and the exit code.

    Args:
        args: the words after `sres`; None: this process's.
        cluster: what to work on; None: what the configuration says.
    """
    try:
        result: Any = cli.main(args, "sres", standalone_mode=False, obj=cluster or ClusterView())
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except SresError as error:
        return _complain(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return UsageError.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "sres"
        text = f"{error.format_message()}{_meant(error)} (see `{path} --help`)"
        return _complain(text, UsageError.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        return _BROKEN_PIPE
    except UnicodeEncodeError as error:
        word = error.object[error.start : error.end]
        return _complain(f"{word!a} is no text in {error.encoding}", UsageError.exit_code)
    except OSError as error:
        name = f"{error.filename}: " if error.filename is not None else ""
        return _complain(f"{name}{error.strerror or error}", SresError.exit_code)


def _meant(error: click.UsageError) -> str:
    """Return the command that may have been meant by one that there is not. (click itself says so
    of groups whose commands are loaded.)"""
    word = re.fullmatch(r"No such command '(.*)'\.", error.format_message())
    if word is None or error.ctx is None or not isinstance(error.ctx.command, _Lazy):
        return ""
    # Late: only a typo needs it.
    import difflib

    match = difflib.get_close_matches(word[1], _COMMANDS, n=1)
    return f" Did you mean '{match[0]}'?" if match else ""


def _complain(text: str, code: int) -> int:
    line = " ".join(_shortened(word) for word in text.split())
    click.echo("sres: error: " + "".join(c if c.isprintable() else "?" for c in line), err=True)
    return code


def _shortened(word: str) -> str:
    """Return a word without its middle, if it is longer than any that a person has written."""
    half = MAX_WORD // 2
    return word if len(word) <= MAX_WORD else f"{word[:half]}…{word[-half:]}"


def main() -> None:
    """Run the console entry."""
    keep_exit_codes()
    if sys.stdout is None:
        # It was closed (`>&-`): what cannot be shown is done all the same.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (it stays open to the end)
    code = call()
    if code == _BROKEN_PIPE:
        # Python flushes stdout once more at its end, and would complain about the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
