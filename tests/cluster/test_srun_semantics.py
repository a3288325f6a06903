"""The meaning of srun's own options to a supervised step: as to plain srun, on each attempt."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import FLAG, Site, WaitFor, allocate

from slurm_resilience.lab import Lab, LabSpec

QUICK = {"resume": {"diagnosis_wait": 0.2, "max_relaunches": 1}}
FAILS_ONCE = "ulimit -c 0; [ $SRES_ATTEMPT = 2 ] || { [ $SLURM_PROCID = 0 ] && kill -SEGV $$; }"
"""The first attempt ends by a crash of task 0, the second one well."""
SAY = "echo $SLURM_PROCID $SLURM_NODEID $SLURM_LOCALID $SLURM_NTASKS $CUDA_VISIBLE_DEVICES"

# Stands in for Pyxis: --container-image puts the task into namespaces of its own, as a container
# would: other files, another host name, none of the host's environment but Slurm's.
CONTAINER = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>
#include <slurm/spank.h>
SPANK_PLUGIN(container, 1)
static int wanted;
static int on_image(int val, const char *arg, int remote) { wanted = 1; return 0; }
static struct spank_option image = { "container-image", "IMAGE", "an image", 1, 0, on_image };
int slurm_spank_init(spank_t sp, int ac, char **av) { return spank_option_register(sp, &image); }
int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
    if (!wanted)
        return 0;
    if (unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC) != 0 ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", "/srv", "tmpfs", 0, NULL) != 0 || sethostname("inside", 6) != 0)
        return -1;
    return spank_setenv(sp, "CONTAINER", "yes", 1);
}
"""


@pytest.fixture(scope="module")
def lab(
    built_plugin: Path,
    plugin_headers: list[str],
    shared_lab: Callable[[LabSpec], Lab],
    tmp_path_factory: pytest.TempPathFactory,
) -> Lab:
    lab = shared_lab(
        LabSpec(nodes=3, gres="gpu:2", plugin=built_plugin, daemons=False, sres_options=QUICK)
    )
    folder = tmp_path_factory.mktemp("container")
    source, library = folder / "container.c", folder / "container.so"
    source.write_text(CONTAINER)
    includes = [f"-I{word.removeprefix('SLURM_INCLUDE=')}" for word in plugin_headers]
    words = ["cc", "-shared", "-fPIC", "-o", library, source, *includes]
    subprocess.run(words, check=True, capture_output=True)
    with (lab.directory / "etc" / "plugstack.conf").open("a") as plugstack:
        plugstack.write(f"required {library}\n")
    return lab


@pytest.fixture(scope="module")
def job(lab: Lab) -> Iterator[str]:
    job = allocate(lab, "-w", "n[1-2]", "--exclusive", "--gres=gpu:2")
    yield job
    lab.run(["scancel", job])


@pytest.fixture
def site(lab: Lab, job: str, tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    site = Site(lab, job, tmp_path, wait_for)
    yield site
    site.expect_nothing_left()


def last_attempt(site: Site, *words: str, program: str = SAY) -> tuple[list[str], list[str]]:
    """Words of plain srun's tasks, and of the second attempt of a supervised one."""
    plain = site.run("srun", *words, "sh", "-c", program)
    assert plain.code == 0, plain
    again = f"{FAILS_ONCE}; [ $SRES_ATTEMPT = 1 ] && exec sleep 30; {program}"
    supervised = site.run("srun", FLAG, *words, "sh", "-c", again)
    assert supervised.code == 0, supervised
    return sorted(plain.stdout.splitlines()), sorted(supervised.stdout.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        "-n3 -m plane=2",
        "--ntasks-per-node=2",
        "-n4 --gpus=4 --label",
        "-n2 --gpus-per-task=1 -c2",
    ],
)
def test_tasks_are_laid_out_as_before(site: Site, words: str) -> None:
    plain, again = last_attempt(site, *words.split())
    assert plain == again


def test_multi_prog(site: Site) -> None:
    """Each rank has a program of its own, and its own variables."""
    crash = "ulimit -c 0; [ $SRES_ATTEMPT = 2 ] || kill -SEGV $$; echo first $NODE_RANK $NNODES"
    wait = "[ $SRES_ATTEMPT = 2 ] || exec sleep 30; echo others %t $NODE_RANK $SLURM_NODE"
    (site.directory / "first.sh").write_text(crash)
    (site.directory / "others.sh").write_text(wait.replace("%t", "$1"))
    (site.directory / "ranks").write_text("0 sh first.sh\n1-3 sh others.sh %t\n")
    end = site.run("srun", FLAG, "-n4", "--label", "--multi-prog", "ranks")
    assert end.code == 0, end
    assert sorted(end.stdout.splitlines()) == [
        "0: first 0 2",
        "1: others 1 0 0",
        "2: others 2 1 1",
        "3: others 3 1 1",
    ]


def test_a_task_in_a_container(site: Site) -> None:
    """Its own files and host name hide nothing of what the supervisor must know of its end."""
    say = "hostname; ls /srv | wc -l; echo $CONTAINER $NODE_RANK $MASTER_NODE $SRES_ATTEMPT"
    words = ("-n2", "-N2", "--container-image=pytorch")
    inside = f"{FAILS_ONCE}; [ $SRES_ATTEMPT = 1 ] && exec sleep 30; {say}"
    end = site.run("srun", FLAG, *words, "sh", "-c", inside)
    assert end.code == 0, end
    assert sorted(end.stdout.split("\n")) == sorted(
        ["", "inside", "inside", "0", "0", "yes 0 n1 2", "yes 1 n1 2"]
    )
    assert "task 0 on n1 ended with exit code 139" in end.stderr


# Stands in for Apptainer, which is the step's program: it runs the command that it is given in
# namespaces of its own, as a child, and ends as that did.
APPTAINER = """\
#!/bin/sh
# apptainer exec IMAGE COMMAND...
export APPTAINER_CONTAINER="$2"
shift 2
unshare --user --map-current-user --mount --ipc "$@"
"""


def test_apptainer_as_the_program(site: Site) -> None:
    """The program's crash, its variables and its folder are those of a program without it."""
    command = site.directory / "apptainer"
    command.write_text(APPTAINER)
    command.chmod(0o755)
    is_current = "[ $(cat $SRES_DIR/token) = $SRES_TOKEN ] && echo current"
    say = f"echo $APPTAINER_CONTAINER $NODE_RANK $MASTER_NODE $SRES_ATTEMPT $({is_current})"
    inside = f"{FAILS_ONCE}; [ $SRES_ATTEMPT = 1 ] && exec sleep 30; {say}"
    words = ("-n2", "-N2", "./apptainer", "exec", "pytorch.sif", "sh", "-c", inside)
    end = site.run("srun", FLAG, *words)
    assert end.code == 0, end
    lines = [f"pytorch.sif {rank} n1 2 current" for rank in range(2)]
    assert sorted(end.stdout.splitlines()) == lines, end
    assert "task 0 on n1 ended with exit code 139" in end.stderr, end
    assert "recovered: attempt 2" in end.stderr, end


def test_tasks_that_wait_for_one_that_ended(site: Site) -> None:
    """After -W seconds srun ends the others."""
    program = '[ "$SLURM_PROCID" = 0 ] || exec sleep 60'
    plain, supervised = site.both("-n2", "-W", "1", "sh", "-c", program)
    assert plain.code == supervised.code, supervised
    assert "task 1 on n2 ended with exit code 137" in supervised.stderr, supervised


def test_a_checkpoint_on_sigterm_is_waited_for(site: Site) -> None:
    """scancel, and Slurm at the time limit, sends SIGTERM, and SIGKILL after KillWait."""
    save = 'trap "sleep 2; touch saved.$SLURM_PROCID; exit 0" TERM; touch up.$SLURM_PROCID; '
    job = allocate(site.lab, "-w", "n3", "--exclusive")
    program = save + "while :; do sleep 0.1; done"
    srun = site.start("srun", FLAG, "-n2", "sh", "-c", program, SLURM_JOB_ID=job)
    for rank in (0, 1):
        site.wait_for((site.directory / f"up.{rank}").exists, 30, "the task runs")
    site.lab.run(["scancel", job], check=True)
    _, err = srun.communicate(timeout=60)
    saved = sorted(path.name for path in site.directory.glob("saved.*"))
    assert saved == ["saved.0", "saved.1"], err
    assert "attempt 2" not in err


def test_a_step_that_a_rank_starts_is_no_part_of_that_ranks_training(site: Site) -> None:
    """A task hands on what it was told: its seat, where its training meets, how it may grow."""
    outer = ["SRES_TOKEN=77.0.1", "SRES_NODES=1:9", "SRES_SIZES=1,9", "SRES_LENT=1", "NNODES=9"]
    outer += ["SRES_INCARNATION=4", "SRES_SEAT=5", "SRES_SEATS_HERE=5", "SRES_MEET=x", "RANK=5"]
    program = (
        "echo $SRES_TOKEN $NNODES; env | grep -E '^(SRES_(NODES|SIZES|LENT|IN|SEAT|MEET)|RANK=)'"
    )
    done = site.run("env", *outer, "srun", FLAG, "-N1", "-n1", "sh", "-c", f"{program}; true")
    assert done.stdout.split() == [f"{site.job}.0.1", "1"], done
