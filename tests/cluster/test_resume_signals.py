"""Exit codes, output and signals of a supervised step, side by side with plain srun."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import FLAG, WAYS, End, Site, Terminal, WaitFor, allocate, own_words

from slurm_resilience.lab import Lab, LabSpec

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = {"resume": {"diagnosis_wait": 0.2, "max_relaunches": 1}}
"""So that a program that fails again and again is given up soon."""


def build(shared_lab: Callable[[LabSpec], Lab], plugin: Path, daemons: bool, cpus: int = 4) -> Lab:
    spec = LabSpec(nodes=3, plugin=plugin, daemons=daemons, cpus=cpus, sres_options=QUICK)
    return shared_lab(spec)


@pytest.fixture(scope="module")
def lab(built_plugin: Path, shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    return build(shared_lab, built_plugin, daemons=False)


@pytest.fixture(scope="module")
def failing_lab(built_plugin: Path, shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    """For tests that need every node, or take one away."""
    return build(shared_lab, built_plugin, daemons=False, cpus=3)


@pytest.fixture(scope="module")
def job(lab: Lab) -> Iterator[str]:
    """A job on n1 and n2 for all tests that only start steps."""
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    yield job
    lab.run(["scancel", job])


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "sresctld"])
def any_job(
    request: pytest.FixtureRequest, built_plugin: Path, shared_lab: Callable[[LabSpec], Lab]
) -> Iterator[tuple[Lab, str]]:
    """The same with sresctld and without."""
    if not request.param:
        yield request.getfixturevalue("lab"), request.getfixturevalue("job")
        return
    lab = build(shared_lab, built_plugin, daemons=True)
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    yield lab, job
    lab.run(["scancel", job])


def watched(site: Site) -> Iterator[Site]:
    """For one test, which must leave nothing behind."""
    yield site
    site.expect_nothing_left()


@pytest.fixture
def any_site(any_job: tuple[Lab, str], tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    yield from watched(Site(*any_job, tmp_path, wait_for))


@pytest.fixture
def site(lab: Lab, job: str, tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    yield from watched(Site(lab, job, tmp_path, wait_for))


@pytest.fixture
def own_job(failing_lab: Lab, tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    """A job on n1 and n2 that may lose a node."""
    job = allocate(failing_lab, "--no-kill", "-w", "n[1-2]", "--exclusive", "--time=60")
    try:
        yield from watched(Site(failing_lab, job, tmp_path, wait_for))
    finally:  # a test that leaves something behind fails, and the others go on
        failing_lab.run(["scancel", job])
        failing_lab.run(["scontrol", "update", "node=n2", "state=resume"])
        failing_lab.wait_states({"n[1-3]": "IDLE"})


# --- exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 7", 7),
        ("exit 255", 255),
        ("exit $((3 + SLURM_PROCID))", 4),
        ("exit $((4 - 4 * SLURM_PROCID))", 4),
    ],
)
def test_an_exit_code_is_the_programs_own(any_site: Site, program: str, code: int) -> None:
    plain, supervised = any_site.both("-n2", "sh", "-c", f"echo run >>runs; {program}")
    assert plain.code == code
    assert supervised.alike == plain.alike
    assert (any_site.directory / "runs").read_text() == "run\n" * 4, "each was started once"


@pytest.mark.parametrize("number", ["KILL", "TERM", "SEGV", "ABRT"])
def test_a_killed_task_is_tried_again_before_its_code_is_passed_on(site: Site, number: str) -> None:
    program = f"echo run >>runs; ulimit -c 0; kill -{number} $$"
    plain, supervised = site.both("-n1", "-w", "n1", "sh", "-c", program)
    assert supervised.code == plain.code == 128 + signal.Signals[f"SIG{number}"]
    assert (site.directory / "runs").read_text() == "run\n" * 3
    assert "not resumed" in supervised.stderr


def test_a_program_that_cannot_be_started(site: Site) -> None:
    for program in ("/nonexistent", "/etc/passwd"):
        plain, supervised = site.both("-n1", program)
        assert plain.code != 0
        assert supervised.alike == plain.alike


def wrap(site: Site, first: str) -> None:
    """A sres.toml whose Slurm commands run a line of shell first."""
    commands = site.directory / "bin"
    commands.mkdir()
    for name in ("scontrol", "squeue", "scancel", "salloc"):
        (commands / name).write_text(f'#!/bin/sh\n{first}\nexec {shutil.which(name)} "$@"\n')
        (commands / name).chmod(0o755)
    text = f"slurm_bin = '{commands}'\n[resume]\ndiagnosis_wait = 0.2\n"
    (site.directory / "sres.toml").write_text(text)


def test_slurmctld_is_away_when_the_program_ends(site: Site) -> None:
    """For the supervisor only: Slurm itself takes half a minute to get over it."""
    complaint = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    wrap(site, f"test -e away && {{ echo '{complaint}' >&2; exit 1; }}")
    config = str(site.directory / "sres.toml")
    for code in (0, 5):
        program = f"touch away; echo up; exit {code}"
        srun = site.start("srun", FLAG, "-n1", "sh", "-c", program, SRES_CONFIG=config)
        assert srun.stdout is not None and srun.stderr is not None
        assert srun.stdout.readline() == "up\n"
        if code:
            assert "exit code 5" in srun.stderr.readline()
            said = srun.stderr.readline()
            assert said.startswith("sres: ") and "waiting for slurmctld: " in said
            (site.directory / "away").unlink()
        assert srun.wait(30) == code
        (site.directory / "away").unlink(missing_ok=True)


@pytest.mark.parametrize("code", [0, 5])
def test_slurmctld_is_away_when_srun_starts(site: Site, code: int) -> None:
    """For the first srun only: the program has not begun, so it has not failed."""
    etc = site.lab.directory / "etc"
    # Beside the lab's own file, where srun looks for its plugins.
    away = etc / "away.conf"
    text = re.sub("SlurmctldPort=.*", "SlurmctldPort=1", (etc / "slurm.conf").read_text())
    away.write_text(f"{text}MessageTimeout=2\n")
    first = f"test -e asked || {{ touch asked; export SLURM_CONF={away}; }}"
    own = f'#!/bin/sh\ncase "$*" in *--help*) ;; *) {first};; esac\nexec srun "$@"\n'
    (site.directory / "srun").write_text(own)
    (site.directory / "srun").chmod(0o755)
    program = f"echo $SRES_ATTEMPT; exit {code}"
    end = site.run("sres", "run", "--", "./srun", "-n1", "sh", "-c", program)
    away.unlink()
    assert (end.code, end.stdout) == (code, "2\n"), end
    assert "Unable to contact slurm controller" in end.stderr
    assert "starting attempt 2" in end.stderr


# --- input and output -----------------------------------------------------------------------------


def test_standard_input(site: Site) -> None:
    text = "".join(f"line {number}\n" for number in range(20000))
    for words in (["-n1", "cat"], ["-n2", "cat"], ["-n2", "-i", "1", "cat"], ["-n1", "head", "-1"]):
        plain, supervised = site.both(*words, text=text)
        assert plain.code == 0
        assert supervised.alike == plain.alike
    here = "$SRUN -n1 cat <<END\none\n$HOME\nEND\necho after; while read x; do echo $x; done <<<y"
    plain, supervised = site.shell(here)
    assert supervised == plain
    assert plain.stdout.splitlines() == ["one", "/root", "after", "y"]


def test_standard_output_and_error(site: Site) -> None:
    program = ["sh", "-c", "echo out; echo err >&2; exit 3"]
    for words in (["-n2"], ["-n2", "--label"], ["-n2", "-o", "%t.out", "-e", "%t.err"]):
        plain, supervised = site.both(*words, *program)
        assert supervised.alike == plain.alike
    written = {path.name: path.read_text() for path in site.directory.glob("*.*")}
    assert written.keys() == {"0.out", "1.out", "0.err", "1.err"}
    assert (written["0.out"], written["1.out"]) == ("out\n", "out\n")


def test_the_order_of_output_and_error_in_one_file(site: Site) -> None:
    program = "for i in $(seq 50); do echo o$i; sleep 0.004; echo e$i >&2; sleep 0.004; done"
    plain, supervised = site.shell(f"$SRUN -n1 sh -c '{program}' 2>&1")
    assert supervised.stdout.count("\n") == 100
    # Slurm itself may exchange two lines on a busy machine, but not what stands far apart.
    order = [int(line[1:]) for line in supervised.stdout.splitlines()]
    assert max(abs(a - b) for a, b in zip(order, sorted(order), strict=True)) <= 2
    assert sorted(plain.stdout) == sorted(supervised.stdout)


@pytest.mark.parametrize(
    "where", ["2>&1 | head -1", "2>&1 >/dev/null | head -1", ">&-", "<&-", "2>/dev/full"]
)
def test_nobody_reads(site: Site, where: str) -> None:
    root = site.lab.spec.slurm_root
    if where == ">&-" and root is not None and Path(root).name == "26.05":
        pytest.skip("excused: plain srun of this release hangs when its standard output is closed")
    program = "echo o; echo e >&2; sleep 0.3; echo o; echo e >&2; echo done >>done; exit 3"
    plain, supervised = site.shell(f"$SRUN -n1 sh -c '{program}' {where}; echo ${{PIPESTATUS[0]}}")
    if plain.stdout.splitlines()[-1] == "137" and root is not None:
        pytest.skip("excused: plain srun of this release kills its step when the reader has gone")
    assert plain.stdout.splitlines()[-1] == "3"
    assert supervised.stdout == plain.stdout
    assert (site.directory / "done").read_text() == "done\n" * 2


def test_standard_error_is_closed(site: Site) -> None:
    """Plain srun takes five seconds longer then, for reasons of its own."""
    program = "echo o; echo e >&2; exit 3"
    end = site.run("bash", "-c", f"srun {FLAG} -n1 sh -c '{program}' 2>&-")
    assert end == End(3, "o\n", "")


def test_a_slow_reader_gets_everything(site: Site) -> None:
    size = 400_000
    program = f"head -c {size} /dev/zero | tr '\\\\0' x >&2"
    plain, supervised = site.shell(f'$SRUN -n1 sh -c "{program}" 2>&1 | (sleep 1; wc -c)')
    assert supervised.stdout == f"{size}\n"
    if plain.stdout != f"{size}\n" and site.lab.spec.slurm_root is not None:
        pytest.skip("excused: plain srun of this release loses output to a slow reader")
    assert plain.stdout == f"{size}\n"


# --- a terminal -----------------------------------------------------------------------------------

CTRL_C, CTRL_BACKSLASH = "\x03", "\x1c"
UNTIL = "echo up; while ! test -e go; do sleep 0.05; done; echo end; exit 4"


def keys(site: Site, words: list[str], strike: Callable[[Terminal], None]) -> list[Terminal]:
    """The same keys for both sruns."""
    struck = []
    for way in WAYS:
        terminal = Terminal(site, ["srun", *way, *words], {"SLURM_JOB_ID": site.job})
        strike(terminal)
        struck.append(terminal)
        (site.directory / "go").touch()
        terminal.code = terminal.end()
        (site.directory / "go").unlink()
    return struck


def test_a_pseudo_terminal(site: Site) -> None:
    def strike(terminal: Terminal) -> None:
        terminal.type("echo a$((1 + 1)); sleep 100\r")
        terminal.expect("a2\r\n")
        site.wait_for(lambda: [p for p in site.processes() if p == "sleep 100 "], 30, "sleep")
        terminal.type(CTRL_C)
        site.wait_for(lambda: "sleep 100 " not in site.processes(), 30, "its end")
        terminal.type("exit 5\r")

    plain, supervised = keys(site, ["--pty", "-n1", "sh"], strike)
    assert plain.code == supervised.code == 5


def test_one_ctrl_c_shows_the_state_and_changes_nothing(site: Site) -> None:
    def strike(terminal: Terminal) -> None:
        terminal.expect("up")
        terminal.type(CTRL_C)
        terminal.expect("task 0: ")
        (site.directory / "go").touch()
        terminal.expect("end")

    plain, supervised = keys(site, ["-n1", "sh", "-c", UNTIL], strike)
    assert plain.code == supervised.code == 4
    # srun says unknown of a task that runs where it has not heard so yet.
    told = [own_words(end.seen.replace("unknown", "running")) for end in (plain, supervised)]
    assert told[0] == told[1]


@pytest.mark.parametrize("trap", ["", "trap 'exit 9' INT; "])
def test_two_ctrl_c_end_the_step(site: Site, trap: str) -> None:
    def strike(terminal: Terminal) -> None:
        terminal.expect("up")
        terminal.type(CTRL_C)
        terminal.expect("one more within 1 sec")
        terminal.type(CTRL_C)

    # Nothing but a signal ends it: `go` may be there before Slurm has sent one.
    program = f"{trap}echo up; while :; do sleep 0.05; done"
    plain, supervised = keys(site, ["-n1", "sh", "-c", program], strike)
    assert supervised.code == plain.code == (9 if trap else 130)
    assert "sres: " not in supervised.seen


@pytest.mark.parametrize("option", ["-X", "--quit-on-interrupt"])
def test_one_ctrl_c_where_one_is_enough(site: Site, option: str) -> None:
    def strike(terminal: Terminal) -> None:
        terminal.expect("up")
        terminal.type(CTRL_C)
        terminal.expect("sending Ctrl-C")

    plain, supervised = keys(site, [option, "-n1", "sh", "-c", "echo up; exec sleep 60"], strike)
    assert supervised.code == plain.code == 130
    assert supervised.seen.count("up\r") == 1


def test_ctrl_backslash(site: Site) -> None:
    def strike(terminal: Terminal) -> None:
        terminal.expect("up")
        terminal.type(CTRL_BACKSLASH)

    plain, supervised = keys(site, ["-n1", "sh", "-c", "echo up; exec sleep 60"], strike)
    assert supervised.code == plain.code == 137
    assert supervised.seen.count("srun: Quit") == plain.seen.count("srun: Quit") == 1


def test_salloc_at_a_terminal(site: Site) -> None:
    for way in WAYS:
        srun = ["srun", *way, "-n2", "sh", "-c", "echo up; exec sleep 60"]
        terminal = Terminal(site, ["salloc", "-N1", "--exclusive", *srun], {})
        terminal.expect("up\r\nup")
        terminal.type(CTRL_C)
        terminal.expect("one more within 1 sec")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "sres: " not in terminal.seen


# --- signals to srun's process --------------------------------------------------------------------

SLEEP = "echo up; exec sleep 60"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_step(any_site: Site, number: signal.Signals) -> None:
    plain, supervised = any_site.acted_on(lambda srun: srun.send_signal(number), SLEEP, "-n1")
    assert supervised.code == plain.code == 137
    assert supervised.stderr.count("forcing job termination") == 1
    assert "sres: " not in supervised.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGINT, signal.SIGCONT]
)
def test_a_signal_that_ends_nothing(site: Site, number: signal.Signals) -> None:
    traps = "trap 'echo one; exit 4' USR1; trap 'echo two; exit 4' USR2; "
    program = traps + "echo up; for i in 1 2 3 4 5 6 7; do sleep 0.1; done; exit 5"
    plain, supervised = site.acted_on(lambda srun: srun.send_signal(number), program, "-n1")
    assert plain.code in (4, 5)
    assert (supervised.code, supervised.stdout) == (plain.code, plain.stdout)


def test_two_interrupts_to_the_process(site: Site) -> None:
    def interrupt(srun: subprocess.Popen[str]) -> None:
        srun.send_signal(signal.SIGINT)
        # What srun says would have to be read from a pipe that communicate() wants.
        try:
            srun.wait(0.3)
        except subprocess.TimeoutExpired:
            srun.send_signal(signal.SIGINT)

    plain, supervised = site.acted_on(interrupt, SLEEP, "-n1")
    assert supervised.code == plain.code == 130


def test_kill_9_ends_the_step(site: Site) -> None:
    srun = site.start("srun", FLAG, "-n1", "sh", "-c", SLEEP)
    assert srun.stdout is not None
    assert srun.stdout.readline() == "up\n"
    os.kill(site.inside(srun), signal.SIGKILL)
    assert srun.wait(30) == -signal.SIGKILL
    forget_fence(site)


@pytest.mark.parametrize("strike", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_diagnosis(site: Site, strike: signal.Signals) -> None:
    config = site.directory / "sres.toml"
    config.write_text("[resume]\ndiagnosis_wait = 600.0\n")
    srun = site.start("srun", FLAG, "-n1", "sh", "-c", "echo up; exit 5", SRES_CONFIG=str(config))
    assert srun.stderr is not None
    assert "exit code 5" in srun.stderr.readline()
    site.wait_for(lambda: not site.steps(), 30, "the step's end")
    real = os.path.realpath(shutil.which("srun") or "")
    site.wait_for(lambda: not [p for p in site.processes() if p.startswith(real)], 30, "srun")
    srun.send_signal(strike)
    assert srun.wait(20) == 5


# --- scancel and the like -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options", "code"),
    [([], [], 137), (["-s", "INT"], [], 130), ([], ["-Q", "-e", "none"], 137)],
)
def test_a_cancelled_step_is_not_brought_back(
    any_site: Site, words: list[str], options: list[str], code: int
) -> None:
    def cancel(_: subprocess.Popen[str]) -> None:
        any_site.lab.run(["scancel", *words, any_site.steps()[-1]])

    plain, supervised = any_site.acted_on(cancel, SLEEP, *options, "-n1")
    assert supervised.code == plain.code == code
    assert supervised.alike == plain.alike or not options
    assert "recovered" not in supervised.stderr


def test_a_cancelled_step_with_a_terminal_is_not_brought_back(site: Site) -> None:
    def strike(terminal: Terminal) -> None:
        terminal.expect("up\r\n")
        site.lab.run(["scancel", site.steps()[-1]])

    plain, supervised = keys(site, ["--pty", "-n1", "sh", "-c", SLEEP], strike)
    assert plain.code == supervised.code == 137
    assert "attempt 2" not in supervised.seen


def test_scancel_with_a_signal(site: Site) -> None:
    # In the background: else the shell tells of a sleep that died of the signal, if one ran.
    program = "trap 'echo one; exit 4' USR1; echo up; while :; do sleep 0.1 & wait; done"
    plain, supervised = site.acted_on(
        lambda _: site.lab.run(["scancel", "-s", "USR1", site.job]), program, "-n1"
    )
    assert (plain.code, plain.stdout) == (4, "one\n")
    assert supervised.alike == plain.alike


def in_batch(site: Site, way: tuple[str, ...], srun: str, before: str = "") -> tuple[str, Path]:
    """A batch job whose tasks have printed ``up``; its id and output."""
    output = site.directory / f"batch{len(way)}"
    script = f"#!/bin/bash\n{before}\nsrun {' '.join(way)} {srun}\necho rc=$?\n"
    words = ["sbatch", "--parsable", "-N1", "--exclusive", "--time=5", f"--output={output}"]
    env = {"BESIDE": site.mark}
    job = site.lab.run(words, cwd=site.directory, env=env, input=script, check=True).stdout.strip()

    def text() -> str:
        return output.read_text() if output.exists() else ""

    site.wait_for(lambda: "up\n" in text(), 30, text)
    return job, output


@pytest.mark.parametrize("words", [["scancel"], ["scancel", "--full", "-s", "TERM"]])
def test_a_cancelled_job(site: Site, words: list[str]) -> None:
    for way in WAYS:
        job, output = in_batch(site, way, f"-n2 sh -c '{SLEEP}'")
        site.lab.run([*words, job])
        site.wait_for(lambda job=job: not site.job_state(job), 60, "the job's end")
        assert output.read_text().count("forcing job termination") <= 1
        assert "sres: " not in output.read_text()


def test_a_signal_to_the_whole_job_arrives_once(site: Site) -> None:
    outputs = []
    program = 'n=0; trap "n=\\$((n + 1)); echo one" USR1; echo up; '
    program += "i=0; while [ $i -lt 15 ]; do sleep 0.1; i=$((i + 1)); done; exit 4"
    for way in WAYS:
        job, output = in_batch(site, way, f"-N1 -n1 sh -c '{program}'", "trap : USR1")
        site.lab.run(["scancel", "--full", "-s", "USR1", job])
        site.wait_for(lambda job=job: not site.job_state(job), 60, "the job's end")
        outputs.append([x for x in output.read_text().splitlines() if x in ("one", "rc=4")])
    assert outputs[1][-1] == outputs[0][-1] == "rc=4"
    # srun hands on what it gets, and Slurm signals the tasks too: once or twice.
    assert len(outputs[1]) <= 3


def test_a_requeued_job(site: Site) -> None:
    job, output = in_batch(site, (FLAG,), f"-n2 sh -c '{SLEEP}'")
    site.lab.run(["scontrol", "requeue", job], check=True)
    site.wait_for(lambda: site.job_state(job) == "PENDING", 60, "PENDING")
    assert "recovered" not in output.read_text()
    site.lab.run(["scancel", job])


def test_a_suspended_job(site: Site) -> None:
    job, output = in_batch(site, (FLAG,), f"-N1 -n1 sh -c '{UNTIL}'")
    site.lab.run(["scontrol", "suspend", job], check=True)
    site.wait_for(lambda: site.job_state(job) == "SUSPENDED", 30, "SUSPENDED")
    (site.directory / "go").touch()
    site.lab.run(["scontrol", "resume", job], check=True)
    site.wait_for(lambda: not site.job_state(job), 60, "the job's end")
    assert output.read_text().splitlines()[-1] == "rc=4"


# --- spare nodes ----------------------------------------------------------------------------------


@pytest.fixture
def waiting(own_job: Site) -> Iterator[subprocess.Popen[str]]:
    """A supervised srun that has lost n2 and waits for another node, while there is none."""
    other = allocate(own_job.lab, "-w", "n3", "--exclusive")
    srun = own_job.start("srun", FLAG, "-N2", "sh", "-c", SLEEP)
    assert srun.stdout is not None and srun.stderr is not None
    assert srun.stdout.readline() == "up\n"
    own_job.lab.run(["scontrol", "update", "node=n2", "state=down", "reason=test"], check=True)
    pending = ["squeue", "-h", "-t", "PD", "-n", f"sres-{own_job.job}"]
    own_job.wait_for(lambda: own_job.lab.run(pending).stdout, 30, "its request")
    try:
        yield srun
    finally:
        own_job.lab.run(["scancel", other])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_it_waits_for_a_node(
    own_job: Site, waiting: subprocess.Popen[str], number: signal.Signals
) -> None:
    os.kill(own_job.inside(waiting), number)
    assert waiting.wait(30) != 0
    if number == signal.SIGKILL:
        forget_fence(own_job)


def test_a_helper_ends_with_its_supervisor(own_job: Site) -> None:
    """kill -9 after the spare node was granted and before it is in the job."""
    wrap(own_job, 'case "$*" in *numnodes=0*) touch stuck; exec sleep 60;; esac')
    config = str(own_job.directory / "sres.toml")
    srun = own_job.start("srun", FLAG, "-N2", "sh", "-c", SLEEP, SRES_CONFIG=config)
    assert srun.stdout is not None
    assert srun.stdout.readline() == "up\n"
    own_job.lab.run(["scontrol", "update", "node=n2", "state=down", "reason=test"], check=True)
    own_job.wait_for((own_job.directory / "stuck").exists, 30, "a granted node")
    assert f"sres-{own_job.job}" in names_of_jobs(own_job)
    os.kill(own_job.inside(srun), signal.SIGKILL)
    srun.wait(30)
    for process in own_job.marked():
        with contextlib.suppress(ProcessLookupError):  # they end each other
            os.kill(process, signal.SIGKILL)
    own_job.wait_for(lambda: names_of_jobs(own_job) == ["no-shell"], 30, "the helper's end")
    forget_fence(own_job)


def names_of_jobs(site: Site) -> list[str]:
    """All that Slurm shows."""
    return sorted(site.lab.run(["squeue", "-h", "-o", "%j"]).stdout.split())


def test_after_one_ctrl_c_a_node_may_still_fail(own_job: Site) -> None:
    program = "echo up on $SLURM_STEP_NODELIST; while ! test -e go; do sleep 0.05; done; exit 4"
    words = ["srun", FLAG, "-N2", "sh", "-c", program]
    terminal = Terminal(own_job, words, {"SLURM_JOB_ID": own_job.job})
    terminal.expect("up on n[1-2]\r\nup on n[1-2]")
    terminal.type(CTRL_C)
    terminal.expect("one more within 1 sec")  # srun may not know yet that the tasks run
    own_job.lab.run(["scontrol", "update", "node=n2", "state=down", "reason=test"], check=True)
    terminal.expect("up on n[1,3]")
    terminal.expect("recovered: attempt 2")
    (own_job.directory / "go").touch()
    assert terminal.end() == 4


def forget_fence(site: Site) -> None:
    """Remove the fence: after kill -9 no process was left to do it."""
    shutil.rmtree(site.directory / ".sres")


# --- odd surroundings -----------------------------------------------------------------------------


def test_long_lines_and_large_environments(site: Site) -> None:
    many = [f"{number:0200}" for number in range(500)]
    for words in (
        ["sh", "-c", "echo $#", "sh", *many],
        ["sh", "-c", "echo ${#1}", "-", "y" * 120_000],
    ):
        plain, supervised = site.both("-n1", *words)
        assert supervised == plain
    large = {f"LARGE{number}": "z" * 100_000 for number in range(10)}
    plain, supervised = site.both("-n1", "sh", "-c", "echo ${#LARGE9}", **large)
    assert supervised == plain


def test_odd_working_directories(site: Site) -> None:
    plain, supervised = site.shell("mkdir gone; cd gone; rmdir ../gone; $SRUN -n1 pwd")
    assert supervised == plain
    plain, supervised = site.shell("cd /proc; $SRUN -n1 pwd")
    assert supervised.alike == plain.alike
    # It is removed between srun's start and the supervisor's.
    gone = site.run("sh", "-c", "mkdir gone; cd gone; rmdir ../gone; sres run -- srun -n1 pwd")
    assert "Traceback" not in gone.stderr, gone.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTHONPATH", "."), ("PYTHONHOME", "/nonexistent"), ("PYTHONINSPECT", "1")],
)
def test_variables_of_python_are_the_programs(site: Site, name: str, value: str) -> None:
    """A module of another Python on PYTHONPATH, say, must not be taken for the supervisor's own."""
    for module in ("msgspec", "slurm_resilience", "signal"):
        (site.directory / f"{module}.py").write_text("raise ImportError('of another Python')\n")
    plain, supervised = site.both("-n1", "sh", "-c", f"echo ${name}", **{name: value})
    assert supervised == plain


@pytest.mark.parametrize(
    "script",
    [
        # Called by its path, where PATH has none of Slurm's commands.
        "PATH=/nonexistent /usr/bin/$SRUN -n1 /bin/echo x",
        # Python sets LC_CTYPE in the locale C.
        "env -u LANG -u LC_ALL -u LC_CTYPE $SRUN -n1 sh -c 'echo x${LC_CTYPE-unset}'",
        # A file that the shell has opened for srun.
        "$SRUN -n2 -o >(sort) sh -c 'echo x$SLURM_PROCID' | cat",
        "exec 2000>&1; $SRUN -n1 echo x",
        # No file may grow: there is no fence then, which is told.
        "ulimit -f 0; $SRUN -n1 echo x 2>/dev/null",
        # A parent that wants to hear nothing of its children: the kernel keeps no exit code then.
        "trap '' CHLD; $SRUN -n1 sh -c 'echo x; exit 7' 2>/dev/null",
    ],
)
def test_odd_calls(site: Site, script: str) -> None:
    plain, supervised = site.shell(f"ulimit -n 4096; {script}")
    assert supervised == plain
    assert plain.stdout.startswith("x")


def test_a_job_that_a_task_submits_gets_nothing_of_the_attempt(
    site: Site, wait_for: WaitFor
) -> None:
    """A training that submits its successor: there it would be stale, and write no checkpoint."""
    seen = site.directory / "seen"
    script = f"env | cut -d= -f1 > {seen}.new; mv {seen}.new {seen}"
    words = ["sbatch", "-N1", "--output=/dev/null", "--wrap", script]
    # As in a job that was requeued; Slurm takes it out of no other job.
    assert site.run("srun", FLAG, "-n1", *words, SLURM_RESTART_COUNT="1").code == 0
    wait_for(seen.exists, 30, "the job has run")
    not_its = {"SRES_TOKEN", "SRES_DIR", "SRES_ATTEMPT", "SRES_STEP", "SLURM_RESTART_COUNT"}
    assert not not_its & {*seen.read_text().split()}


def test_a_relative_slurm_conf(site: Site) -> None:
    shutil.copy(site.lab.directory / "etc" / "slurm.conf", site.directory)
    plain, supervised = site.both("-n1", "echo", "x", SLURM_CONF="slurm.conf")
    assert supervised == plain


def test_two_in_one_job(site: Site) -> None:
    script = "$SRUN -N1 --exact sh -c 'echo a; sleep 0.5; exit 3' & one=$!\n"
    script += "$SRUN -N1 --exact sh -c 'echo b; sleep 0.5; exit 6' & two=$!\n"
    script += "wait $one; echo $?; wait $two; echo $?"
    plain, supervised = site.shell(script)
    assert supervised.alike == plain.alike


def test_a_plain_user(failing_lab: Lab, built_plugin: Path, wait_for: WaitFor) -> None:
    lab = failing_lab
    plugstack = lab.directory / "etc" / "plugstack.conf"
    before = plugstack.read_text()
    home = lab.directory / "home" / "alice"
    supervisor = lab.directory / "sres-resume"
    shutil.copy(built_plugin, lab.directory / "sres.so")
    supervisor.write_text(f'#!/bin/sh\nexec {" ".join(user_python(lab))} -m {MAIN} "$@"\n')
    supervisor.chmod(0o755)
    plugstack.write_text(f"optional {lab.directory}/sres.so supervisor={supervisor}\n")
    job = allocate(lab, "-N2", "--exclusive", user="alice")
    try:
        site = Site(lab, job, home, wait_for)
        for program in ("id -un; exit 7", "id -un; kill -TERM $$", "id -un; pwd"):
            ends = [
                lab.run(
                    ["srun", *way, "-n2", "sh", "-c", program],
                    user="alice",
                    cwd=home,
                    env=site.environment,
                )
                for way in WAYS
            ]
            assert ends[0].returncode == ends[1].returncode
            # Slurm itself may lose the last words of a killed task.
            assert "kill" in program or "alice\n" in ends[1].stdout
        site.expect_nothing_left()
    finally:
        lab.run(["scancel", job])
        plugstack.write_text(before)


MAIN = "slurm_resilience.resume.main"


def user_python(lab: Lab) -> list[str]:
    """A Python that alice may run: the tests' own, or the system's with our packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    path = "PYTHONPATH=" + ":".join([str(REPOSITORY), *packages])
    for python in (sys.executable, f"/usr/bin/{version}"):
        words = ["env", path, python]
        if lab.run([*words, "-c", f"import {MAIN}"], user="alice", cwd="/").returncode == 0:
            return words
    pytest.skip(f"no {version} that another user may run")


def test_srun_without_the_flag_is_srun(site: Site) -> None:
    """No file of ours is touched, no process of ours is started."""
    end = site.run("srun", "-n2", "sh", "-c", "echo $SRES_TOKEN; ls -A", SRES_CONFIG="/nonexistent")
    assert (end.code, re.sub(r"\s", "", end.stdout), end.stderr) == (0, "", "")
