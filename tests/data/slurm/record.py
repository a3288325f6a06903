"""Record what a real Slurm prints of nodes in odd states, of jobs, steps and its configuration.

``record.py VERSION…`` writes ``VERSION/*.txt`` beside this file; scripts/record-slurm calls it.
`tests/unit/test_recorded.py` says what must be read from them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from slurm_resilience.errors import LabError
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import root_of
from slurm_resilience.slurm import command_words
from slurm_resilience.slurm.cli import environment

HERE = Path(__file__).parent
MARK = "<8d0c1f6e5a4b3c2d>"
ADMINISTRATOR = "carol@corp.example.com"
"""A user as SSSD shows those of another domain. She may change nodes."""
NODES = 16


def main(versions: list[str]) -> None:
    for version in versions:
        spec = LabSpec(
            nodes=NODES,
            network=True,
            gres="gpu:h100:2",
            slurmdbd=True,
            daemons=False,
            plugin=None,
            lifecycle=None,
            slurm_root=root_of(version),
        )
        with Lab.up(spec, name=f"record-{version.replace('.', '-')}", tied=True) as lab:
            folder = HERE / version
            folder.mkdir(exist_ok=True)
            for name, text in Recorder(lab).record().items():
                (folder / f"{name}.txt").write_text(text)
                print(f"{version}/{name}.txt: {len(text)} characters")


class Recorder:
    """One lab, brought into odd states."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def record(self) -> dict[str, str]:
        self._add_administrator()
        self._start_jobs()
        self._upset_nodes()
        return {
            "nodes": self._said("scontrol", "show", "node", "-a", "-d", "-o"),
            "squeue": self._said("squeue", "-a", "-r", "-h", "-o", command_words.job_format(MARK)),
            "columns": self._said("squeue", "-a", "-r", "-h", "-O", command_words.JOB_COLUMNS),
            "columns_exclusive": self._said(
                "squeue", "-a", "-r", "-h", "-O", command_words.JOB_COLUMNS_EXCLUSIVE
            ),
            "squeue_help_format": self._said("squeue", "--helpFormat"),
            "jobs": self._said("scontrol", "show", "job", "-o"),
            "steps": self._said("scontrol", "show", "step", "1", "-o"),
            "config": self._said("scontrol", "show", "config"),
            "srun_help": self._said("srun", "--help"),
            "sinfo": self._said("sinfo", "-h", "-N", "-o", "%N %T"),
        }

    def _said(self, *words: str, user: str | None = None) -> str:
        return self._lab.run(words, user=user, env=environment()).stdout

    def _do(self, *words: str, user: str | None = None) -> None:
        self._lab.run(words, user=user, env=environment(), check=True)

    def _add_administrator(self) -> None:
        for file, line in (
            ("passwd", f"{ADMINISTRATOR}:x:20003:20001::/tmp:/bin/sh\n"),
            ("group", "carol:x:20003:\n"),
        ):
            with (self._lab.directory / file).open("a", encoding="utf-8") as people:
                people.write(line)
        words = [f"name={ADMINISTRATOR}", "account=lab", "adminlevel=administrator"]
        self._do("sacctmgr", "-i", "add", "user", *words)

    def _start_jobs(self) -> None:
        script = "srun -N2 -n2 sleep 600"
        common = ["sbatch", "--parsable", "--output=/dev/null", "--chdir=/"]
        self._do(*common, "-N2", "-w", "n[1-2]", "--exclusive", "--gres=gpu:2", f"--wrap={script}")
        self._do(*common, "-N1", "-w", "n3", "--no-requeue", "--wrap=sleep 600")
        self._do(*common, "-N1", "-w", "n3", "--exclusive=user", "--wrap=sleep 600")
        name = "--job-name=x UserId=root(0)\nNodeList=n[1-9]"
        self._do(*common, "-N2", "--exclusive", "-w", "n[1,2]", name, "--wrap=sleep 600")
        self._wait("1 RUNNING", "2 RUNNING", "3 RUNNING")
        deadline = time.monotonic() + 30
        while "StepId=1.0" not in self._said("scontrol", "show", "step", "1", "-o"):
            if time.monotonic() > deadline:
                raise LabError("the step of job 1 did not start")
            time.sleep(0.1)

    def _wait(self, *lines: str) -> None:
        deadline = time.monotonic() + 60
        while not set(lines) <= set(self._said("squeue", "-h", "-o", "%A %T").splitlines()):
            if time.monotonic() > deadline:
                raise LabError(f"the jobs are not {lines}")
            time.sleep(0.1)

    def _upset_nodes(self) -> None:
        self._set("n2", "state=fail", "reason=Action:Replace")
        self._set("n4", "state=drain", "reason=vendor on site, hands off")
        self._set("n5", "state=fail", "reason=Action:Replace")
        self._set("n6", "state=drain", "reason=RMA 4711, keep out", user=ADMINISTRATOR)
        self._set("n7", "state=drain", "reason=first line\nsecond a=b\nthird")
        self._set("n8", "state=drain", "reason=see https://a.example.com/t?id=7 [bob@ops]. v1.2")
        self._set("n9", "state=fail", "reason=x [root@2026-01-01T00:00:00] y Comment=no")
        self._set(
            "n10", "state=down", "reason=gres/gpu count reported lower than configured (1 < 2)"
        )
        self._set("n11", "state=drain", "reason=fan", user=ADMINISTRATOR)
        self._set("n11", "comment=rack 7, see the wiki [bob@2026-01-01T00:00:00]")
        self._set("n12", "comment=spare part ordered, due on Monday")
        self._set("n13", "state=drain", "reason=Action:Replace ")
        for word in ("extra=a=1 b c", "instanceid=i-0123456789", "instancetype=p5.48xlarge"):
            # Releases have learnt these one after the other.
            with contextlib.suppress(LabError):
                self._set("n13", word)
        with contextlib.suppress(LabError):
            self._set("n14", "state=down", "reason=back in an hour", "resumeafter=3600")
        words = ["create", "reservation", "starttime=now", "duration=60", "users=root"]
        self._do(
            "scontrol", *words, "reservationname=vendor", "flags=ignore_jobs", "nodes=n[4-6,12]"
        )
        maintenance = ["flags=maint,ignore_jobs", "nodes=n[11,15]"]
        self._do("scontrol", *words, "reservationname=work", *maintenance)
        self._lab.power_off("n16")
        self._set("n16", "state=down", "reason=Not responding")
        # The controller shows a reservation's node as reserved with its next look.
        deadline = time.monotonic() + 30
        while "RESERVED" not in self._lab.node_states()["n12"]:
            if time.monotonic() > deadline:
                raise LabError("n12 is not shown as reserved")
            time.sleep(0.1)

    def _set(self, node: str, *words: str, user: str | None = None) -> None:
        self._do("scontrol", "update", f"nodename={node}", *words, user=user)


if __name__ == "__main__":
    main(sys.argv[1:])
