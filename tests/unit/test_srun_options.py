"""srun's command line is read as getopt_long reads it, and changed without harm to the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.resume.srun.srun_options import (
    BUILTIN,
    OptionSpec,
    OptionTable,
    SrunCommand,
    Takes,
    parse_help,
    read_table,
    split,
    table_without_help,
)

HELP = """\
Usage: srun [OPTIONS(0)... [executable(0) [args(0)...]]]

Parallel run options:
  -A, --account=name          charge job to specified account
      --bb=<spec>             burst buffer specifications
  -d, --dependency=type:jobid[:time] defer job until condition on jobid is satisfied
      --container             Path to OCI container bundle
  -I, --immediate[=secs]      exit if resources not available in "secs"
  -l, --label                 prepend task number to lines of stdout/err
      --exclusive[=user]      for job allocation, this allocates nodes in
                              --mem >= --mem-per-cpu if --mem is specified.
      --exclusive[=mcs]       allocate nodes in exclusive mode when
  -B  --extra-node-info=S[:C[:T]]  combine request of sockets per node,
      --cpu-bind=             Bind tasks to CPUs
      --tres-per-task=list    list of tres required per task

Options provided by plugins:
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use
      --container-remap-root  [pyxis] ask to be remapped to root

      --auto-resume=N         1: start the step again after a node failure (v2)
                              (0: off)
"""
TABLE = BUILTIN.extended(parse_help(HELP))


def cut(*args: str) -> SrunCommand:
    return split(args, TABLE)


# --- what getopt_long says ------------------------------------------------------------------------


class COption(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("has_arg", ctypes.c_int),
        ("flag", ctypes.c_void_p),
        ("val", ctypes.c_int),
    )


HAS_ARG = {Takes.NOTHING: 0, Takes.VALUE: 1, Takes.ATTACHED: 2}
# getopt knows no "spelled out": the same table without them.
COMMON = OptionTable(tuple(spec for spec in TABLE.specs if not spec.spelled_out))


def getopt_long(
    args: Sequence[str], table: OptionTable
) -> tuple[list[tuple[str, str | None]], tuple[str, ...]] | None:
    """(options, program) as the C library sees them; None where it complains."""
    libc = ctypes.CDLL(None)
    optind, optarg = (ctypes.c_int.in_dll(libc, "optind"), ctypes.c_char_p.in_dll(libc, "optarg"))
    ctypes.c_int.in_dll(libc, "opterr").value = 0
    names = sorted({spec.canonical for spec in table.specs})
    number = {name: 1000 + i for i, name in enumerate(names)}
    letters = {ord(spec.short): spec.canonical for spec in table.specs if spec.short}
    meaning = letters | {value: name for name, value in number.items()}
    longs = (COption * (len(table.specs) + 1))()
    for slot, spec in zip(longs, table.specs, strict=False):
        slot.name, slot.has_arg = spec.name.encode(), HAS_ARG[spec.takes]
        slot.val = ord(spec.short) if spec.short else number[spec.canonical]
    shorts = "+" + "".join(s.short + ":" * HAS_ARG[s.takes] for s in table.specs if s.short)
    words = [b"srun", *(word.encode() for word in args)]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    optind.value = 0
    options: list[tuple[str, str | None]] = []
    while (found := libc.getopt_long(len(words), argv, shorts.encode(), longs, None)) != -1:
        if found == ord("?"):
            return None
        value = optarg.value
        options.append((meaning[found], None if value is None else value.decode()))
    return options, tuple(args[optind.value - 1 :])


plain = st.sampled_from(["python", "train.py", "4", "", "-", ":", "--", "n[1-2]", "a=b", "-1"])
long_names = st.sampled_from([spec.name for spec in COMMON.specs])
shortened = st.builds(lambda name, n: name[: max(1, n)], long_names, st.integers(1, 12))
long_words = st.builds(
    lambda name, value: f"--{name}" if value is None else f"--{name}={value}",
    st.one_of(long_names, shortened),
    st.one_of(st.none(), st.sampled_from(["", "4", "a b", "--x"])),
)
all_letters = "".join(spec.short for spec in COMMON.specs) + "z9"
short_words = st.text(all_letters, min_size=1, max_size=4).map(lambda letters: "-" + letters)
lines = st.lists(st.one_of(plain, long_words, long_words, short_words, short_words), max_size=8)


@settings(max_examples=1500)
@given(lines)
def test_a_line_is_read_as_getopt_long_reads_it(args: list[str]) -> None:
    # The plugin registers some options only where one of them is on the line.
    more = any(word.startswith("--auto-resume-") for word in args)
    specs = (spec for spec in COMMON.specs if more or not spec.name.startswith("auto-resume-"))
    expected = getopt_long(args, OptionTable(tuple(specs)))
    try:
        command = split(args, COMMON)
    except UsageError:
        assert expected is None
        return
    if expected is None:
        # getopt refuses a flag with a value; whether that is right depends on srun's version.
        flags = {s.name for s in COMMON.specs if s.takes is Takes.NOTHING}
        assert any(o.name in flags and o.value is not None for o in command.options)
        return
    assert ([(o.name, o.value) for o in command.options], command.program) == expected


@given(lines)
def test_what_is_written_is_read_again(args: list[str]) -> None:
    try:
        command = split(args, COMMON)
    except UsageError:
        return
    assert split(command.argv, COMMON) == command


@given(lines)
def test_taking_out_an_option_leaves_the_others(args: list[str]) -> None:
    try:
        command = split(args, COMMON)
    except UsageError:
        return
    less = split(command.without("nodes", "-w", "--exclude").argv, COMMON)
    assert less.program == command.program
    gone = {"nodes", "nodelist", "exclude"}
    assert less.options == tuple(o for o in command.options if o.name not in gone)
    more = split(less.adding("--nodelist=n1", "--label").argv, COMMON)
    assert (more.value("w"), more.has("label"), more.program) == ("n1", True, command.program)


# --- by example -----------------------------------------------------------------------------------


def test_an_ordinary_line() -> None:
    command = cut("--auto-resume=1", "-N2", "--ntasks", "4", "-l", "python", "-n", "9", "--label")
    assert command.program == ("python", "-n", "9", "--label")
    assert (command.value("nodes"), command.value("-n"), command.has("label")) == ("2", "4", True)
    assert command.without("--auto-resume", "N").adding("--nodes=3").argv == (
        *("--ntasks", "4", "-l", "--nodes=3"),
        *("python", "-n", "9", "--label"),
    )


@pytest.mark.parametrize("words", [["-n4"], ["-n", "4"], ["--ntasks=4"], ["--ntasks", "4"]])
def test_every_way_to_write_a_value(words: list[str]) -> None:
    command = cut("-n9", *words, "true")
    assert (command.value("ntasks"), command.value("n"), command.program) == ("4", "4", ("true",))


def test_shortened_names() -> None:
    assert cut("--auto-res=1", "true").value("auto-resume") == "1"
    assert cut("--auto-resume=1", "--auto-resume-sp=2", "a").value("auto-resume-spares") == "2"
    with pytest.raises(UsageError, match="--auto-res may be any of"):
        cut("--auto-res=1", "--auto-resume-spares=2", "true")
    with pytest.raises(UsageError, match="--auto-resume- may be any of"):
        cut("--auto-resume-=1", "true")
    assert cut("--nodel=n1", "true").value("nodelist") == "n1"
    assert cut("--ntasks=4", "true").value("ntasks") == "4"
    with pytest.raises(UsageError, match="--nta may be any of --ntasks"):
        cut("--nta=4", "true")
    with pytest.raises(UsageError, match="no option --nonsense"):
        cut("--nonsense", "true")


def test_names_of_the_same_option() -> None:
    assert cut("--pack-group=1", "true").value("het-group") == "1"
    assert cut("--tasks-per-node=2", "true").value("ntasks-per-node") == "2"


def test_a_value_that_must_be_attached() -> None:
    command = cut("--kill-on-bad-exit", "0", "true")
    assert command.program == ("0", "true")
    assert command.has("K")
    assert command.value("K") is None
    assert cut("-K0", "--immediate=5", "true").value("kill-on-bad-exit") == "0"


def test_options_of_plugins_and_what_help_misleads_about() -> None:
    command = cut("--container-image", "x", "--container-remap-root", "--container", "b", "python")
    assert (command.value("container-image"), command.value("container")) == ("x", "b")
    assert command.program == ("python",)


def test_a_later_slurms_options() -> None:
    assert cut("--segment", "4", "true").program == ("true",)
    assert cut("--tres-per-t=gres:gpu:1", "true").value("tres-per-task") == "gres:gpu:1"
    # On 22.05, --ext is --extra-node-info, whatever a later Slurm has.
    assert split(["--ext=1", "true"], BUILTIN).value("B") == "1"


def test_heterogeneous_steps_and_multi_prog() -> None:
    assert cut("-n1", "a", ":", "-n2", "b").heterogeneous
    assert not cut("-n1", "a", "b").heterogeneous
    assert cut("--multi-prog", "conf").multi_prog
    assert cut("--jobid=7", "true").jobid == "7"
    assert cut("true").jobid is None


def test_a_program_that_looks_like_an_option() -> None:
    command = cut("-n1", "--", "-x", "y")
    assert command.program == ("-x", "y")
    assert command.argv == ("-n1", "--", "-x", "y")


@pytest.mark.parametrize("args", [["-n"], ["--ntasks"], ["-lN"]])
def test_a_value_that_is_missing(args: list[str]) -> None:
    with pytest.raises(UsageError, match="needs a value"):
        cut(*args)


@pytest.mark.parametrize("word", ["nodes=3", "-N3", "--", "--=3"])
def test_only_long_options_are_added(word: str) -> None:
    with pytest.raises(UsageError, match="not written as"):
        cut("true").adding(word)


def test_help_is_parsed() -> None:
    specs = {spec.name: spec for spec in parse_help(HELP)}
    assert specs["account"] == OptionSpec("account", Takes.VALUE, "A")
    assert specs["immediate"] == OptionSpec("immediate", Takes.ATTACHED, "I")
    assert specs["extra-node-info"] == OptionSpec("extra-node-info", Takes.VALUE, "B")
    assert specs["container-remap-root"] == OptionSpec("container-remap-root", Takes.NOTHING)
    assert "mem" not in specs


def test_an_srun_that_does_not_tell(tmp_path: Path) -> None:
    assert read_table(str(tmp_path / "srun")) is BUILTIN
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    assert read_table(str(silent)) is BUILTIN


def test_an_srun_that_tells(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\ncat <<'END'\n{HELP}END\n")
    srun.chmod(0o755)
    assert read_table(str(srun)).long("container-image").takes is Takes.VALUE


@pytest.mark.parametrize(
    ("line", "protocol", "known"),
    [
        ("--auto-resume=1 -N2 --ntasks=4 --overlap train --any=1", "2", True),
        ("--auto-resume=1 -lN2 -c 4 train", "2", True),
        ("--auto-resume=1 train", "", False),  # not the plugin has started it
        ("--auto-res=1 train", "2", False),  # another option may begin so
        ("--auto-resume=1 --container-image=x train", "2", False),  # a plugin's of the site
        ("--auto-resume=1 -9 train", "2", False),
    ],
)
def test_help_is_read_only_where_it_would_tell_more(line: str, protocol: str, known: bool) -> None:
    table = table_without_help(line.split(), protocol)
    assert (table is not None) is known
    if table is not None:
        assert table.plugin_protocol == int(protocol)
        assert table.listed("auto-resume")
        assert split(line.split(), table) == split(line.split(), TABLE)
