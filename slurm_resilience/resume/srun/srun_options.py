"""Read srun's command line: tell its options from the program, and change the options.

srun reads its line with glibc's ``getopt_long``, so this module reads it by the same rules: options
end at the first word that is none, long names may be shortened while they stay unambiguous, short
ones may stand together (``-lN2``), and an option whose value is optional takes it only when
attached (``--nice=5``, ``-K0``). Which options exist comes from ``BUILTIN`` and from
``srun --help``, which knows the site's plugins. Everything but ``read_table`` is pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property

import msgspec

from slurm_resilience.errors import UsageError

HELP_SECONDS = 10.0
CALLS_BACK = "is no srun: it starts the supervisor again"
"""In the words of a supervisor that was started by the srun of another one."""
MORE_THAN_THE_FLAG = "auto-resume-"
"""The plugin registers its options that begin so only where one is on the line, so that shortened
names of --auto-resume stay unambiguous (spank/srun.c)."""


class Takes(Enum):
    """The kinds of options, by what may follow them."""

    NOTHING = "nothing"
    VALUE = "a value, attached or as the next word"
    ATTACHED = "a value, when attached"


class OptionSpec(msgspec.Struct, frozen=True):
    """One option that srun knows."""

    name: str
    takes: Takes
    short: str = ""
    same_as: str = ""
    # Of a later Slurm than 22.05: makes no shortened name ambiguous unless --help lists it.
    spelled_out: bool = False

    @property
    def canonical(self) -> str:
        return self.same_as or self.name


class OptionTable(msgspec.Struct, frozen=True, dict=True):
    """The options of one srun."""

    specs: tuple[OptionSpec, ...]
    listed_names: frozenset[str] = frozenset()
    """Names that this srun's --help lists."""
    plugin_protocol: int = 0
    """The number that our plugin in this srun tells; 0: it has none, or one that tells none."""
    whole_names: bool = False
    """No name may be shortened: what else begins so is not known."""

    def listed(self, name: str) -> bool:
        """Return whether this srun's own --help lists the option."""
        return name in self.listed_names

    @cached_property
    def _by_name(self) -> dict[str, OptionSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def _by_letter(self) -> dict[str, OptionSpec]:
        return {spec.short: spec for spec in self.specs if spec.short}

    def long(self, name: str) -> OptionSpec:
        """Return the option that ``--name`` means: itself, or the only one that begins so."""
        exact = self._by_name.get(name)
        if exact is not None:
            return exact
        if self.whole_names:
            raise UsageError(f"--{name} is not known without srun's own help")
        found = [s for s in self.specs if s.name.startswith(name) and not s.spelled_out]
        # Names of the same option do not make a beginning ambiguous.
        if len({spec.canonical for spec in found}) == 1:
            return found[0]
        if not found:
            raise UsageError(f"srun has no option --{name}")
        names = " ".join(f"--{spec.name}" for spec in found)
        raise UsageError(f"--{name} may be any of {names}")

    def letter(self, letter: str) -> OptionSpec:
        """Return the option that ``-l`` means."""
        spec = self._by_letter.get(letter)
        if spec is None:
            raise UsageError(f"srun has no option -{letter}")
        return spec

    def registered_for(self, args: Sequence[str]) -> OptionTable:
        """Return the options that srun knows where it is called with this line."""
        if any(word.startswith(f"--{MORE_THAN_THE_FLAG}") for word in args):
            return self
        kept = (spec for spec in self.specs if not spec.name.startswith(MORE_THAN_THE_FLAG))
        return msgspec.structs.replace(self, specs=tuple(kept))

    def extended(self, specs: Sequence[OptionSpec]) -> OptionTable:
        """Return this table with those of ``specs`` that it does not have; its own entries win."""
        known = self._by_name
        listed_names = frozenset(spec.name for spec in specs)
        kept = (
            OptionSpec(s.name, s.takes, s.short, s.same_as) if s.name in listed_names else s
            for s in self.specs
        )
        added = (spec for spec in specs if spec.name not in known)
        listed_names |= self.listed_names
        return msgspec.structs.replace(self, specs=(*kept, *added), listed_names=listed_names)


class GivenOption(msgspec.Struct, frozen=True):
    """One option as it was given. ``words`` are what srun is to be given for it."""

    name: str
    value: str | None
    words: tuple[str, ...]
    short: str = ""

    def called(self, name: str) -> bool:
        """Return whether ``name`` is its long name or its letter, with or without dashes."""
        bare = name.lstrip("-")
        return bare != "" and bare in (self.name, self.short)


class SrunCommand(msgspec.Struct, frozen=True):
    """srun's arguments, taken apart. For a heterogeneous step: those of its first component; the
    others are part of ``program``."""

    options: tuple[GivenOption, ...]
    program: tuple[str, ...]

    def has(self, name: str) -> bool:
        return any(option.called(name) for option in self.options)

    def value(self, name: str) -> str | None:
        """Return the value of the last option ``name``; None: it is not given, or has no value."""
        given = [option.value for option in self.options if option.called(name)]
        return given[-1] if given else None

    @property
    def heterogeneous(self) -> bool:
        return ":" in self.program

    @property
    def multi_prog(self) -> bool:
        return self.has("multi-prog")

    @property
    def jobid(self) -> str | None:
        return self.value("jobid")

    def without(self, *names: str) -> SrunCommand:
        """Return the same without these options."""
        kept = tuple(o for o in self.options if not any(o.called(name) for name in names))
        return SrunCommand(kept, self.program)

    def adding(self, *words: str) -> SrunCommand:
        """Return the same with more ``--name`` or ``--name=value`` options; the last ones win."""
        return SrunCommand((*self.options, *map(_written, words)), self.program)

    @property
    def argv(self) -> tuple[str, ...]:
        """Return the words to give to srun."""
        options = tuple(word for option in self.options for word in option.words)
        # Only "--" keeps getopt from reading such a program as an option.
        divider = ("--",) if self.program and self.program[0].startswith("-") else ()
        return (*options, *divider, *self.program)


def split(args: Sequence[str], table: OptionTable) -> SrunCommand:
    """Take srun's arguments (without argv[0]) apart.

    Raises:
        UsageError: srun would refuse them too.
    """
    options: list[GivenOption] = []
    rest = list(args)
    table = table.registered_for(args)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            options.append(_long_option(word, rest, table))
        else:
            options.extend(_short_options(word, rest, table))
    return SrunCommand(tuple(options), tuple(rest))


def _long_option(word: str, rest: list[str], table: OptionTable) -> GivenOption:
    name, equals, attached = word[2:].partition("=")
    spec = table.long(name)
    # A flag with a value is an error in one Slurm and means something in the next (--pty=...): let
    # srun judge.
    value = attached if equals else None
    words: tuple[str, ...] = (word,)
    if spec.takes is Takes.VALUE and not equals:
        value = _next_word(word, rest)
        words = (word, value)
    return GivenOption(spec.canonical, value, words, spec.short)


def _short_options(word: str, rest: list[str], table: OptionTable) -> Iterator[GivenOption]:
    """Yield the options of one word such as ``-lN2``, each in a word of its own."""
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        spec = table.letter(letter)
        flag = f"-{letter}"
        if spec.takes is Takes.NOTHING:
            yield GivenOption(spec.canonical, None, (flag,), letter)
        elif letters:
            yield GivenOption(spec.canonical, letters, (flag + letters,), letter)
            letters = ""
        elif spec.takes is Takes.ATTACHED:
            yield GivenOption(spec.canonical, None, (flag,), letter)
        else:
            value = _next_word(flag, rest)
            yield GivenOption(spec.canonical, value, (flag, value), letter)


def _next_word(option: str, rest: list[str]) -> str:
    if not rest:
        raise UsageError(f"srun's option {option} needs a value")
    return rest.pop(0)


def _written(word: str) -> GivenOption:
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise UsageError(f"{word!r} is not written as --name or --name=value")
    return GivenOption(name, value if equals else None, (word,))


# Lines of --help begin with "  -n, --ntasks=N", "      --bb=<spec>" or "  -B  --extra-node-info=S";
# what is indented deeper is explanation.
_HELP_LINE = r"(?m)^ {2}(?:-(?P<short>\w),? +| {4})--(?P<name>\w[\w-]*)(?P<mark>\[=|=)?"
_MARKS = {None: Takes.NOTHING, "=": Takes.VALUE, "[=": Takes.ATTACHED}


def parse_help(text: str) -> tuple[OptionSpec, ...]:
    """Return the options that ``srun --help`` lists."""
    specs: dict[str, OptionSpec] = {}
    for match in re.finditer(_HELP_LINE, text):
        name = match["name"]
        specs.setdefault(name, OptionSpec(name, _MARKS[match["mark"]], match["short"] or ""))
    return tuple(specs.values())


# The plugin's own text; Slurm may wrap it.
_PLUGIN_PROTOCOL = r"--auto-resume=N\s[^()-]*\(v(\d{1,6})\)"


def plugin_protocol(help_text: str) -> int:
    """Return the number that our plugin tells in ``srun --help``; 0: it tells none."""
    match = re.search(_PLUGIN_PROTOCOL, help_text)
    return int(match[1]) if match else 0


def table_without_help(args: Sequence[str], protocol: str) -> OptionTable | None:
    """Return the options of an srun whose plugin has started this; None: ask `read_table`.

    Where the line has whole names of Slurm's own options only, `srun --help` would tell no more
    of them.

    Args:
        args: srun's arguments.
        protocol: the number that the plugin has left; empty: it was not the plugin that did.
    """
    if not protocol.isdecimal():
        return None
    table = msgspec.structs.replace(
        BUILTIN,
        listed_names=frozenset({"auto-resume"}),
        plugin_protocol=int(protocol),
        whole_names=True,
    )
    try:
        split(args, table)
    except UsageError:
        return None
    return table


def read_table(srun: str, environment: Mapping[str, str] = os.environ) -> OptionTable:
    """Return the options of the program ``srun``; ``BUILTIN`` alone when it does not tell.

    Args:
        srun: its path.
        environment: the caller's.

    Raises:
        UsageError: it is a program that starts the supervisor again.
    """
    # Late: what the plugin is known to take need not be asked for.
    import subprocess

    # srun reads its defaults before it helps, and refuses a wrong one. A long COLUMNS overruns the
    # buffer in which Slurm wraps the help of plugins' options.
    environment = {
        name: value
        for name, value in environment.items()
        if name != "COLUMNS" and (name == "SLURM_CONF" or not name.startswith(("SLURM_", "SRUN_")))
    }
    try:
        answer = subprocess.run(
            [srun, "--help"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HELP_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, subprocess.CalledProcessError) and CALLS_BACK in error.stderr:
            raise UsageError(error.stderr.strip().rpartition("sres: ")[2]) from None
        return BUILTIN  # the options of this site's plugins are unknown
    table = BUILTIN.extended(parse_help(answer.stdout))
    return msgspec.structs.replace(table, plugin_protocol=plugin_protocol(answer.stdout))


def _specs(takes: Takes, names: str, *, spelled_out: bool = False) -> Iterator[OptionSpec]:
    for word in names.split():
        name, _, short = word.partition(":")
        yield OptionSpec(name, takes, short, _SAME.get(name, ""), spelled_out)


_SAME = {
    "cpu_bind": "cpu-bind",
    "pack-group": "het-group",
    "tasks-per-node": "ntasks-per-node",
}

# srun 22.05's own options, name:letter, as its option table has them. --help leaves out some and
# misleads about others (--container takes a value, --kill-on-bad-exit may), so this goes first.
BUILTIN = OptionTable(
    (
        *_specs(
            Takes.NOTHING,
            """
            contiguous debugger-test disable-status:X exact help:h hold:H interactive label:l
            multi-prog no-allocate:Z overcommit:O oversubscribe:s preserve-env:E pty quiet:Q
            quit-on-interrupt reboot spread-job test-only unbuffered:u usage use-min-nodes
            verbose:v version:V whole
            """,
        ),
        *_specs(
            Takes.VALUE,
            """
            accel-bind account:A acctg-freq auto-resume auto-resume-hangs auto-resume-max-nodes
            auto-resume-min-nodes auto-resume-partition auto-resume-progress auto-resume-qos
            auto-resume-sizes auto-resume-spares
            auto-resume-step-nodes bb bbf bcast-exclude begin:b chdir:D cluster cluster-constraint
            clusters:M comment
            constraint:C container context core-spec:S
            cores-per-socket cpu-bind cpu-freq cpu_bind cpus-per-gpu cpus-per-task:c deadline
            delay-boot dependency:d distribution:m epilog error:e exclude:x export extra-node-info:B
            gid gpu-bind gpu-freq gpus-per-node gpus-per-socket gpus-per-task gpus:G gres gres-flags
            het-group hint input:i job-name:J jobid licenses:L mail-type mail-user mcs-label mem
            mem-bind mem-per-cpu mem-per-gpu mincpus mpi msg-timeout network nodefile:F nodelist:w
            nodes:N ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres
            ntasks:n open-mode output:o pack-group partition:p power prefer priority profile prolog
            qos:q relative:r reservation signal slurmd-debug sockets-per-node sres-env switches
            task-epilog task-prolog tasks-per-node thread-spec threads-per-core threads:T time-min
            time:t tmp uid wait:W wckey
            """,
        ),
        *_specs(
            Takes.ATTACHED,
            """
            bcast compress exclusive immediate:I kill-on-bad-exit:K nice no-kill:k overlap propagate
            resv-ports send-libs
            """,
        ),
        # What 23.02 to 26.05 added, for when --help is not to be had or leaves it out.
        *_specs(
            Takes.VALUE,
            """
            autocomplete container-id container-type extra ignore-signals mem-update resources
            segment tres-bind tres-per-task treewidth
            """,
            spelled_out=True,
        ),
        *_specs(
            Takes.NOTHING,
            "async consolidate-segments parsable spread-segments stepmgr wait-for-children",
            spelled_out=True,
        ),
        *_specs(Takes.ATTACHED, "external-launcher oom-kill-step", spelled_out=True),
    )
)
