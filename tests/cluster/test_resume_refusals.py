"""The refusals of a supervised srun: one line that says what is wrong, and nothing has happened."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import FLAG, End, Site, WaitFor, allocate

from slurm_resilience.lab import Lab, LabSpec

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = ("srun", FLAG)
COMMAND = ("sres", "run", "--", "srun")
PREFIX = "srun: error: sres: "


@pytest.fixture(scope="module")
def lab(built_plugin: Path, shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    return shared_lab(LabSpec(nodes=3, plugin=built_plugin, daemons=False, cpus=2))


@pytest.fixture(scope="module")
def job(lab: Lab) -> Iterator[str]:
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    yield job
    lab.run(["scancel", job])


@pytest.fixture
def site(lab: Lab, job: str, tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    """Nothing that is refused here changes anything."""
    site = Site(lab, job, tmp_path, wait_for)
    before = world(site)
    yield site
    assert world(site) == before
    site.expect_nothing_left()


def world(site: Site) -> str:
    """Jobs, steps and nodes as Slurm shows them."""
    jobs = site.lab.run(["scontrol", "show", "job", "-o", site.job], check=True).stdout
    listed = site.lab.run(["squeue", "-h", "-o", "%i %T %N"], check=True).stdout
    steps = site.lab.run(["squeue", "-h", "-s", "-o", "%i"], check=True).stdout
    nodes = site.lab.node_states()
    return re.sub(r"RunTime=\S+", "", jobs) + listed + steps + str(nodes)


def refused(site: Site, *argv: str, **env: str) -> str:
    """The line of a refusal, without its beginning."""
    started = site.directory / "started"
    end = site.run(*argv, "touch", str(started), **env)
    assert end.code != 0
    assert end.stdout == ""
    lines = end.stderr.splitlines()
    assert len(lines) == 1, end.stderr
    assert not started.exists()
    assert lines[0].startswith(PREFIX), lines[0]
    return lines[0].removeprefix(PREFIX)


BOTH = pytest.mark.parametrize("way", [PLUGIN, COMMAND], ids=["plugin", "sres-run"])


@BOTH
@pytest.mark.parametrize("value", ["banana", "", "2"])
def test_a_value_that_is_none(site: Site, way: tuple[str, ...], value: str) -> None:
    line = refused(site, *way, f"--auto-resume={value}")
    assert line == f"--auto-resume={value}: write 1 (on) or 0 (off)"


@BOTH
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--auto-resume-spares=x"], "--auto-resume-spares=x: write a number of nodes, 0 for none"),
        (["--auto-resume-spares=2"], "has 2 node(s), and one at least has to compute"),
        (["--auto-resume-min-nodes=3"], "the step takes 2 node(s) from the start"),
        (["--auto-resume-min-nodes=1", "-n3"], "--ntasks=3 is no multiple of the step's 2 nodes"),
        (["-N3"], "--nodes=3: job"),
        (["-N3-4"], "has 2 node(s); write -N2, or submit it again"),
        (["--auto-resume-spares=1", "-N2"], "write -N1, or ask sbatch or salloc for 3 nodes"),
    ],
)
def test_nodes_that_the_job_does_not_have(
    site: Site, way: tuple[str, ...], words: list[str], text: str
) -> None:
    assert text in refused(site, *way, *words)


def test_spares_without_a_supervisor(site: Site) -> None:
    for option in ("--auto-resume-spares=1", "--auto-resume-min-nodes=1"):
        assert "are for srun --auto-resume=1: give that" in refused(site, "srun", option)


@BOTH
@pytest.mark.parametrize("options", [[], ["-N2", "--exclusive"]])
def test_an_srun_with_an_allocation_of_its_own(
    site: Site, way: tuple[str, ...], options: list[str]
) -> None:
    outside = Site(site.lab, "", site.directory, site.wait_for)
    line = refused(outside, *way, *options)
    assert "would create its own allocation" in line
    assert "sbatch --nodes=4 --exclusive job.sh" in line
    assert "salloc --nodes=4 --exclusive srun --auto-resume=1 program" in line


@BOTH
def test_a_job_that_shares_its_nodes(
    lab: Lab, job: str, tmp_path: Path, wait_for: WaitFor, way: tuple[str, ...]
) -> None:
    shared = allocate(lab, "-n1", "-w", "n3")
    try:
        line = refused(Site(lab, shared, tmp_path, wait_for), *way)
        assert line.startswith(f"--auto-resume: job {shared} shares its nodes with others")
        assert "add --exclusive to its sbatch or salloc" in line
    finally:
        lab.run(["scancel", shared])


@BOTH
def test_a_job_that_does_not_run(lab: Lab, site: Site, way: tuple[str, ...]) -> None:
    words = ["sbatch", "--parsable", "--hold", "--exclusive", "-o", "/dev/null", "--wrap", "true"]
    held = lab.run(words, check=True).stdout.strip()
    line = refused(site, *way, f"--jobid={held}")
    assert line == f"--auto-resume: job {held} is PENDING, not RUNNING"
    lab.run(["scancel", held])
    site.wait_for(lambda: not site.job_state(held), 30, "its end")
    assert refused(site, *way, f"--jobid={held}").endswith("does not exist or has ended")
    assert "does not exist" in refused(site, *way, "--jobid=99999")


def test_what_is_no_job_id(site: Site) -> None:
    for text in ("abc", "-5", "5_1", "1;2", "²"):
        line = refused(site, *COMMAND, f"--jobid={text}")
        assert line == f"--auto-resume: '{text}' is not a job id"
        # Through the plugin srun has read its own options before we are asked.
        end = site.run(*PLUGIN, f"--jobid={text}", "true")
        assert (end.code != 0, end.stderr.count("\n")) == (True, 1)
    assert refused(site, *COMMAND, SLURM_JOB_ID="abc").endswith("'abc' is not a job id")


def test_a_job_of_somebody_else(lab: Lab, site: Site) -> None:
    """Asked by a plain user, who needs a Python to run us with."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    path = "PYTHONPATH=" + ":".join([str(REPOSITORY), *packages])
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        main = ["env", path, python, "-m", "slurm_resilience.resume.main"]
        words = [*main, "--srun", "/usr/bin/srun", "--", f"--jobid={site.job}", "true"]
        done = lab.run(words, user="alice", cwd="/", env={"SRES_CONFIG": "/dev/null"})
        if done.returncode not in (1, 126, 127):
            break
    else:
        pytest.skip("no Python that another user may run")
    assert done.stderr == f"{PREFIX}--auto-resume: job {site.job} is not yours\n"
    assert done.returncode == 6


@BOTH
def test_a_heterogeneous_step(site: Site, way: tuple[str, ...]) -> None:
    line = refused(site, *way, "-n1", "true", ":", "-n1")
    assert line == "--auto-resume: heterogeneous jobs and steps cannot be resumed"


def test_a_step_that_srun_does_not_wait_for(site: Site) -> None:
    """From 26.05 on; an older srun does not know the option."""
    ways = [COMMAND]
    if "--async" in site.lab.run(["srun", "--help"], check=True).stdout:
        ways.append(PLUGIN)
    for way in ways:
        line = refused(site, *way, "--async")
        assert line.startswith("--auto-resume: srun --async returns at once")


@BOTH
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-w", "n[1-"], "'n[1-' is not a hostlist"),
        (["-x", "n[1-"], "'n[1-' is not a hostlist"),
        (["-w", "n3"], "--nodelist: n3 is not in job"),
        (["-w", "elsewhere"], "--nodelist: elsewhere is not in job"),
    ],
)
def test_hostlists(site: Site, way: tuple[str, ...], options: list[str], said: str) -> None:
    if way == PLUGIN and said.endswith("is not a hostlist"):
        own = site.run("srun", "-N1", *options, "true").stderr
        if own.startswith("srun: fatal: Invalid node list"):
            pytest.skip("excused: this srun refuses such a list itself, before the plugin is asked")
    assert refused(site, *way, *options).startswith(said)


def test_a_hostlist_that_is_a_command(site: Site) -> None:
    line = refused(site, *COMMAND, "-w", "$(touch hacked)")
    assert line.startswith("'$(touch hacked)' is not a hostlist")
    assert not list(site.directory.rglob("hacked"))


@BOTH
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[resume]\ngrase = 3\n", "unknown key 'resume.grase'; did you mean 'grace'?"),
        ("[resume\n", "not valid TOML"),
        ("[resume]\ngrace = 'x'\n", "Expected 'float'"),
        (None, "no such file; write one, or unset SRES_CONFIG"),
        ("slurm_bin = '/no/such/folder'\n", "/no/such/folder/squeue is not there (slurm_bin in"),
    ],
)
def test_configurations(site: Site, way: tuple[str, ...], text: str | None, said: str) -> None:
    config = site.directory / "sres.toml"
    if text is not None:
        config.write_text(text)
    line = refused(site, *way, SRES_CONFIG=str(config))
    assert said in line
    assert str(config) in line or "slurm_bin" in line


@BOTH
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (("AuthInfo=.*", "AuthInfo=socket=/no/such/socket"), 'Failed to access "/no/such/socket"'),
        (("SlurmctldPort=.*", "SlurmctldPort=1"), "Unable to contact slurm controller"),
    ],
)
def test_a_slurm_that_cannot_be_asked(
    site: Site, way: tuple[str, ...], setting: tuple[str, str], said: str
) -> None:
    before = (site.lab.directory / "etc" / "slurm.conf").read_text()
    conf = site.directory / "slurm.conf"
    # Slurm's commands try again for as long as a message may take.
    conf.write_text(re.sub(*setting, before) + "MessageTimeout=2\n")
    line = refused(site, *way, SLURM_CONF=str(conf))
    assert line.startswith(f"--auto-resume: Slurm cannot be asked about job {site.job}")
    assert said in line


def test_a_controller_that_was_stopped(
    lab: Lab, fresh_lab: Callable[[LabSpec], Lab], tmp_path: Path, wait_for: WaitFor
) -> None:
    options = {"MessageTimeout": "2"}
    own = fresh_lab(LabSpec(nodes=1, plugin=lab.spec.plugin, daemons=False, options=options))
    site = Site(own, allocate(own, "-N1", "--exclusive"), tmp_path, wait_for)
    own.kill_daemon("slurmctld")
    for way in (PLUGIN, COMMAND):
        line = refused(site, *way)
        assert "Unable to contact slurm controller" in line
        assert "see whether `scontrol ping` answers" in line


def test_the_words_of_sres_run(site: Site) -> None:
    for words in ([], ["--"], ["--", "ls"], ["--", "/no/such/folder/srun", "true"]):
        end = site.run("sres", "run", *words)
        assert end.code != 0
        assert re.fullmatch(r"sres: error: .*(write srun|write: sres run -- srun).*\n", end.stderr)


# --- hostile names --------------------------------------------------------------------------------

HOSTILE = [
    "; touch hacked",
    "$(touch hacked)",
    "`touch hacked`",
    "a\nb",
    "'\"\\",
    "--help",
    "-n9",
    "%s%n",
    "",
    " ",
    "$HOME",
    "*",
    "é",
]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['SLURM_JOB_NAME']]))"


@pytest.fixture(scope="module")
def bare(shared_lab: Callable[[LabSpec], Lab]) -> Iterator[tuple[Lab, str]]:
    """A site without the plugin, and a job there."""
    lab = shared_lab(LabSpec(nodes=1, plugin=None, daemons=False))
    job = allocate(lab, "-N1", "--exclusive")
    yield lab, job
    lab.run(["scancel", job])


@pytest.fixture(params=["plugin", "without"])
def named(request: pytest.FixtureRequest, tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    """A site with the plugin, and one where a shell hands over the variables."""
    if request.param == "plugin":
        lab, job = request.getfixturevalue("lab"), request.getfixturevalue("job")
    else:
        lab, job = request.getfixturevalue("bare")
    site = Site(lab, job, tmp_path, wait_for)
    yield site
    assert not list(tmp_path.rglob("hacked"))
    site.expect_nothing_left()


def alike(site: Site, *words: str, cwd: Path | None = None) -> End:
    """Run plain srun and ours with the same words: both refuse alike."""

    def run(*srun: str) -> End:
        started = site.start(*srun, *words, cwd=cwd)
        out, err = started.communicate(timeout=60)
        return End(started.returncode, out, err)

    plain = run("srun")
    assert run(*COMMAND).alike == plain.alike
    return plain


def test_arguments(named: Site) -> None:
    end = alike(named, "-n1", "python3", "-c", SHOW, *HOSTILE)
    assert json.loads(end.stdout) == [HOSTILE, "python3"]


def test_job_names(named: Site) -> None:
    for name in ("; touch hacked", "$(touch hacked)\n'\"\\`touch hacked`", "--help"):
        end = alike(named, "-n1", f"--job-name={name}", "python3", "-c", SHOW)
        assert json.loads(end.stdout) == [[], name]


def test_programs_and_directories(named: Site) -> None:
    odd = named.directory / "a;$(touch hacked) '\"\n`touch hacked`"
    odd.mkdir()
    for name in ("--version", "x; touch hacked", "$(touch hacked)", "a'b\"c"):
        shutil.copy("/bin/echo", odd / name)
        assert alike(named, "-n1", f"./{name}", "hi", cwd=odd).stdout == "hi\n"
    assert not list(odd.rglob(".sres"))


def test_a_program_that_looks_like_an_option(named: Site) -> None:
    for words in (["--", "-prog"], ["--", "--auto-resume=1"]):
        end = named.run(*COMMAND, "-n1", *words)
        assert end.code != 0
        assert words[1] in end.stderr


def test_the_variables_without_the_plugin(bare: tuple[Lab, str], tmp_path: Path) -> None:
    lab, job = bare
    words = ["sh", "-c", "echo $NODE_RANK $SLURM_NODE $NNODES $SRES_ATTEMPT $MASTER_NODE; exit 7"]
    done = lab.run([*COMMAND, "-n1", *words], cwd=tmp_path, env={"SLURM_JOB_ID": job})
    assert (done.returncode, done.stdout) == (7, "0 0 1 1 n1\n")
