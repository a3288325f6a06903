"""The lifecycle script that widens a range of ephemeral ports."""

from __future__ import annotations

import subprocess
from pathlib import Path

from slurm_resilience.resume.srun.environment import PORT_BASE, PORT_SPAN

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SCRIPT = Path(__file__).resolve().parents[2] / "lifecycle" / "50-port-range.sh"


def script(file: Path, **environment: str) -> tuple[int, str, str]:
    values = {"PATH": "/usr/bin:/bin", "SRES_PORT_RANGE_FILE": str(file), **environment}
    done = subprocess.run([SCRIPT, "n1"], env=values, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_a_wide_range_is_left_alone(tmp_path: Path):
    file = tmp_path / "range"
    file.write_text("32768\t60999\n")
    assert script(file) == (0, "ephemeral ports 32768-60999", "")
    assert file.read_text() == "32768\t60999\n"


def test_a_narrow_range_is_widened_once(tmp_path: Path):
    file = tmp_path / "range"
    file.write_text("61000\t61999\n")
    code, said, trouble = script(file)
    assert (code, trouble) == (0, "")
    assert said == "ephemeral ports 30000-65535 (were 61000-61999)"
    assert file.read_text() == "30000 65535\n"
    assert script(file) == (0, "ephemeral ports 30000-65535", "")


def test_what_it_sets_leaves_our_master_ports_alone(tmp_path: Path):
    file = tmp_path / "range"
    file.write_text("61000\t61999\n")
    script(file)
    first = int(file.read_text().split()[0])
    assert first >= PORT_BASE + PORT_SPAN


def test_the_site_may_choose(tmp_path: Path):
    file = tmp_path / "range"
    file.write_text("32768\t60999\n")
    assert script(file, SRES_LEAST_PORTS="40000", SRES_PORT_RANGE="15000 65000")[0] == 0
    assert file.read_text() == "15000 65000\n"


def test_a_choice_that_is_too_narrow_itself_is_refused(tmp_path: Path):
    file = tmp_path / "range"
    file.write_text("61000\t61999\n")
    code, _, trouble = script(file, SRES_PORT_RANGE="61000 62000")
    assert code == 1 and "1001" in trouble
    assert file.read_text() == "61000\t61999\n"


def test_one_that_cannot_be_set_fails_with_what_to_do():
    # The kernel's: two numbers, the second smaller, which not even root may write.
    code, said, trouble = script(Path("/proc/sys/fs/inode-nr"))
    assert (code, said) == (1, "")
    assert 'as root: sysctl -w net.ipv4.ip_local_port_range="30000 65535"' in trouble


def test_this_machines_own_range_can_be_read():
    code, said, trouble = script(RANGE, SRES_LEAST_PORTS="1")
    assert (code, trouble) == (0, "")
    assert said == "ephemeral ports {}-{}".format(*RANGE.read_text().split())


def test_one_that_cannot_be_read_fails(tmp_path: Path):
    code, _, trouble = script(tmp_path / "nothing")
    assert code == 1 and "cannot be read" in trouble
