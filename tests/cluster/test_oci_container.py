"""A task in an OCI container (`srun --container`), by Slurm's own oci.conf and runc.

    apt-get install --no-install-recommends runc
    SRES_TEST_OCI=1 scripts/test tests/cluster/test_oci_container.py

Slurm 22.05 gives such a task what the whole step has, and nothing of the task's own: no
SLURM_PROCID, and none of what a plugin sets for each task (NODE_RANK, MASTER_ADDR …).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from beside import FLAG, Site, WaitFor, allocate

from slurm_resilience.lab import Lab, LabSpec

HOST_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
NAME = "%n.%u.%j.%s.%t"
RUNC = "runc --root=/run/runc-%n"
OCI_CONF = f"""\
RunTimeQuery="{RUNC} state {NAME}"
RunTimeKill="{RUNC} kill -a {NAME} SIGKILL"
RunTimeDelete="{RUNC} delete --force {NAME}"
RunTimeRun="{RUNC} run --bundle %b {NAME}"
"""

if "SRES_TEST_OCI" in os.environ:  # it needs runc

    def test_a_task_that_crashes_in_its_container_runs_again(
        fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
    ) -> None:
        lab = fresh_lab(LabSpec(nodes=2, daemons=False))
        (lab.directory / "etc" / "oci.conf").write_text(OCI_CONF)
        lab.run(["scontrol", "reconfigure"], check=True)
        site = Site(lab, allocate(lab, "-N2", "--exclusive"), tmp_path, wait_for)
        program = 'hostname; [ "$SRES_ATTEMPT" = 2 ] || exit 139; echo "$SRES_TOKEN"'
        words = ("-n2", "-N2", "--container", str(bundle(tmp_path / "bundle")))
        end = site.run("srun", FLAG, *words, "sh", "-c", program)
        assert end.code == 0, end
        lines = sorted(end.stdout.splitlines())
        assert lines[:2] == [f"{site.job}.0.2"] * 2
        assert set(lines[2:]) == {"inside"}
        assert "recovered: attempt 2" in end.stderr
        site.expect_nothing_left()


def bundle(path: Path) -> Path:
    """Make an OCI bundle that has the host's programs."""
    for folder in ("proc", "dev", *HOST_FOLDERS):
        (path / "rootfs" / folder.lstrip("/")).mkdir(parents=True)
    host = [
        {"destination": name, "type": "none", "source": name, "options": ["rbind", "ro"]}
        for name in HOST_FOLDERS
    ]
    config = {
        "ociVersion": "1.0.0",
        "hostname": "inside",
        "root": {"path": "rootfs"},
        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["sh"], "env": []},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, *host],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount")]},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
