"""Lines of NHC's configuration: read without a shell, and judged by facts of the node."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience import config
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import ConfigError
from slurm_resilience.health.check import CheckContext, Unjudged
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.host import nhc_config
from slurm_resilience.health.nhc.nhc_facts import (
    NhcFacts,
    NhcFile,
    NhcMount,
    NhcPort,
    NhcProcess,
    NhcSpace,
)
from slurm_resilience.health.nhc.nhc_lines import NhcLine, matches, parse_nhc
from slurm_resilience.health.nhc.nhc_rules import (
    KNOWN_CHECKS,
    NhcOutcome,
    NotJudged,
    judge_line,
    size_bytes,
)
from slurm_resilience.model import CheckResult

GIB = 1 << 30
FACTS = NhcFacts(
    mounts=(
        NhcMount("/dev/sda1", "/", "ext4", "rw,relatime"),
        NhcMount("fs1:/export/home", "/home", "nfs4", "rw,hard"),
        NhcMount("/dev/sr0", "/media", "iso9660", "ro"),
    ),
    space={"/": NhcSpace(100 * GIB, 90 * GIB, 10 * GIB, 1000, 100)},
    memory={
        "MemTotal": 64 * GIB,
        "MemFree": GIB,
        "Buffers": GIB,
        "Cached": 2 * GIB,
        "SwapTotal": 0,
        "SwapFree": 0,
    },
    sockets=2,
    cores=8,
    threads=16,
    net_devices=frozenset({"lo", "eth0"}),
    ports=(NhcPort("mlx5_0", "1", True, 400), NhcPort("mlx5_1", "1", False, 400)),
    processes=(
        NhcProcess("sshd", "/usr/sbin/sshd -D", "root"),
        NhcProcess("bash", "-bash", "eve"),
    ),
    load=(3.0, 2.0, 1.0),
    files=(NhcFile("/dev/null", "aecrwO"), NhcFile("/gone", "")),
)


def said(line: str, facts: NhcFacts = FACTS) -> NhcOutcome:
    (parsed,) = parse_nhc(f"* || {line}", "n1")
    return judge_line(parsed, facts)


@pytest.mark.parametrize(
    ("line", "trouble"),
    [
        ("check_fs_mount_rw /", ""),
        ("check_fs_mount_rw -f /", ""),
        ("check_fs_mount_rw -t ext4 -s /dev/sda1 -f /", ""),
        ("check_fs_mount_rw /media", "/media: its options ro is not /(^|,)rw($|,)/"),
        ("check_fs_mount_ro -f /media", ""),
        ("check_fs_mount -r -s fs1:/export/home -t nfs* -o *hard* -f /home", ""),
        ("check_fs_mount -s 'fs[0-9]:/x' -f /home", "/home: its source fs1:/export/home is not"),
        ("check_fs_mount -f / /scratch", "/scratch is not mounted"),
        ("check_fs_mount_rw / /dev/sdb1", "/: its source /dev/sda1 is not /dev/sdb1"),
        ("check_fs_free / 10%", ""),
        ("check_fs_free / 11%", "/ has 10.0 % free, less than 11%"),
        ("check_fs_free / 9GB", ""),
        ("check_fs_free /dev/sda1 11G", "/dev/sda1 has 10485760 kB free, less than 11G"),
        ("check_fs_used / 98%", ""),
        ("check_fs_used / 90%", "/ has 90.0 % in use, limit 90%"),
        ("check_fs_size / 90GB 110GB", ""),
        ("check_fs_size / '' 90GB", "/: its size, 107374182400 bytes, is more than 90GB"),
        ("check_fs_inodes / 1000 1k", ""),
        ("check_fs_ifree / 101", "/ has 100 inodes free"),
        ("check_fs_iused / 899", "/ has 900 inodes in use"),
        ("check_hw_cpuinfo 2 8 16", ""),
        ("check_hw_cpuinfo 2 8 8", "16 threads, not 8"),
        ("check_hw_cpuinfo '' 16", "8 cores, not 16"),
        ("check_hw_physmem 1k 1TB", ""),
        ("check_hw_physmem 65GB 65GB 5%", ""),
        ("check_hw_physmem 65GB 65GB", "memory, 68719476736 bytes, is less than 65GB"),
        ("check_hw_physmem_free 4GB", ""),
        ("check_hw_physmem_free 5GB", "free memory, 4294967296 bytes, is less than 5GB"),
        ("check_hw_swap 1b 1TB", "swap, 0 bytes, is less than 1b"),
        ("check_hw_swap_free 0", ""),
        ("check_hw_mem 64GB 64GB", ""),
        ("check_hw_mem_free 5GB", "free memory and swap, 4294967296 bytes, is less than 5GB"),
        ("check_hw_eth eth0", ""),
        ("check_hw_eth eth1", "network device eth1 is missing"),
        ("check_hw_ib 400", ""),
        ("check_hw_ib 400 mlx5_0:1", ""),
        ("check_hw_ib 200", "no active InfiniBand port with 200 Gb/s"),
        ("check_hw_ib 400 mlx5_1", "no active InfiniBand port of mlx5_1 with 400 Gb/s"),
        ("check_ps_service -u root -S sshd", ""),
        ("check_ps_service -u !root sshd", "no process of sshd owned by !root"),
        ("check_ps_service -f -m '*sshd -D' ssh", ""),
        ("check_ps_service -d slurmd slurm", "no process of slurm"),
        ("check_ps_daemon sshd root", ""),
        ("check_ps_daemon crond", "no process of crond"),
        ("check_ps_loadavg '' 30", ""),
        ("check_ps_loadavg 2", "load 3 over 1 min, limit 2"),
        ("check_file_test -c -r -w -O /dev/null", ""),
        ("check_file_test -r /dev/null /gone", "/gone: test -r does not hold"),
    ],
)
def test_a_line(line: str, trouble: str) -> None:
    outcome = said(line)
    assert outcome.not_judged == ""
    assert outcome.trouble == trouble or (trouble and outcome.trouble.startswith(trouble))


def test_each_known_check_is_tried() -> None:
    tried = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in KNOWN_CHECKS if f'("{name} ' not in tried] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("check_nv_healthmon", "check_nv_healthmon is not known here"),
        ("check_fs_free /x 1%", "/x is no mount point that can be looked at"),
        ("check_fs_free / much", "'much' is no size"),
        ("check_fs_free /", "it names no least space"),
        ("check_fs_mount -Z /", "option -Z not recognized"),
        ("check_ps_daemon sshd root -D", "the words of a process are not looked at"),
        ("check_hw_cpuinfo two", "'two' is no number"),
        ("check_ps_loadavg low", "'low' is no number"),
        ("check_ps_service -u '/(/' sshd", "missing )"),
        ("check_file_test -N /dev/null", "option -N not recognized"),
        ("check_hw_eth $DEVICE", "it needs a shell"),
        ("check_hw_eth eth0 && touch /x", "it needs a shell"),
        ("check_hw_eth `id`", "it needs a shell"),
        ("check_hw_eth 'eth0", "No closing quotation"),
    ],
)
def test_what_is_not_understood_is_not_judged(line: str, why: str) -> None:
    outcome = said(line)
    assert outcome.trouble == ""
    assert outcome.not_judged.startswith(why)


@pytest.mark.parametrize(
    ("pattern", "host", "expected"),
    [
        ("*", "n1", True),
        ("n?", "n1", True),
        ("!io*", "io7", False),
        ("!io*", "n1", True),
        (r"/^n00[0-5][0-9]\.cc2$/", "n0017.cc2", True),
        (r"/^n00[0-5][0-9]\.cc2$/", "n0083.cc2", False),
        ("{n00[00-99].phys,n000[0-4].bio}", "n0030.phys", True),
        ("{n00[00-99].phys,n000[0-4].bio}", "n0001.bio", True),
        ("{n00[00-99].phys,n000[0-4].bio}", "n0005.bio", False),
        ("{n00[00-99].phys}", "n0100.phys", False),
        ("!{n03,n05,n0[7-9]}", "n08", False),
        ("!{n03,n05,n0[7-9]}", "n04", True),
    ],
)
def test_match_strings(pattern: str, host: str, expected: bool) -> None:
    assert matches(pattern, host) is expected


def test_lines_of_other_hosts_comments_and_variables_are_left_out() -> None:
    text = """
    # a comment || check_hw_eth eth9
    *       || export PATH="$PATH:/opt/bin"
    n*.rh6  || MAX_SYS_UID=499
    n2      || check_hw_eth eth2
    {n[1-4]} || check_hw_eth eth1
    *       || check_hw_eth eth0   # the first one
    no bars
    """
    lines = parse_nhc(text, "n1")
    assert [one.words for one in lines] == [
        ("check_hw_eth", "eth1"),
        ("check_hw_eth", "eth0"),
        (),
    ]
    assert lines[-1].problem == "it has no '||'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1024), ("1k", 1024), ("1kB", 1024), ("1b", 1), ("2MiB", 2 << 20), ("1.5g", 3 << 29)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size_bytes(text) == expected
    with pytest.raises(NotJudged):
        size_bytes(f"-{text}")


arguments = st.sampled_from(
    ["/", "/home", "-f", "-t", "ext4", "-0", "1k", "5%", "", "sshd", "-u", "root", "400", "!", "//"]
)
lines = st.builds(
    lambda name, words: NhcLine(1, (name, *words)),
    st.sampled_from(KNOWN_CHECKS),
    st.lists(arguments, max_size=6),
)


@given(lines, st.sampled_from([FACTS, NhcFacts()]))
def test_any_line_holds_or_fails_or_is_not_judged(line: NhcLine, facts: NhcFacts) -> None:
    outcome = judge_line(line, facts)
    assert not (outcome.trouble and outcome.not_judged)
    assert outcome.fatal == ("-0" not in line.words) or outcome.not_judged


@given(st.text(max_size=200), st.sampled_from(["n1", "", "n1.cluster"]))
def test_any_text_can_be_read(text: str, host: str) -> None:
    for line in parse_nhc(text, host):
        assert bool(line.problem) or line.words
        judge_line(line, FACTS)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_range_holds_its_numbers(low: int, high: int, number: int) -> None:
    pattern = f"{{n[{low:02}-{high:02}]}}"
    assert matches(pattern, f"n{number:02}") == (low <= number <= high)


outcomes = st.builds(
    NhcOutcome,
    st.integers(1, 99),
    st.text("abc", max_size=5),
    st.sampled_from(["", "it fails"]),
    st.just(""),
    st.booleans(),
) | st.builds(NhcOutcome, st.integers(1, 99), st.just("x"), st.just(""), st.just("unknown"))


@given(st.lists(outcomes), st.sampled_from(["monitor", "reset", "reboot", "replace"]))
def test_a_line_that_fails_asks_for_what_the_site_says(
    seen: list[NhcOutcome], asks_for: str
) -> None:
    settings = config.CheckSettings(nhc_asks_for=asks_for)  # type: ignore[arg-type]
    failing = [one for one in seen if one.trouble]
    context = CheckContext(settings=settings)
    if not failing and any(one.not_judged for one in seen):
        with pytest.raises(Unjudged):
            nhc_config.judge(tuple(seen), context)
        return
    findings = nhc_config.judge(tuple(seen), context).findings
    assert [str(one.severity) for one in findings] == [
        asks_for if one.fatal else "monitor" for one in failing
    ]


# --- on a tree --------------------------------------------------------------------------------

CPU = "processor : {}\nphysical id : 0\ncore id : {}\n\n"


def node(root: Path, text: str) -> CheckContext:
    files = {
        "etc/nhc/nhc.conf": text,
        "proc/sys/kernel/hostname": "n1",
        "proc/self/mounts": "/dev/sda1 / ext4 rw 0 0",
        "proc/meminfo": "MemTotal: 1024 kB\nMemFree: 10 kB",
        "proc/cpuinfo": CPU.format(0, 0) + CPU.format(1, 0),
        "proc/loadavg": "0.5 0.4 0.3 1/100 7",
        "proc/7/cmdline": "/usr/sbin/sshd\0-D\0",
        "proc/7/status": "Name: sshd\nUid:\t0\t0\t0\t0",
        "sys/class/net/eth0/operstate": "up",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "some/file": "x",
    }
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(value, encoding="utf-8")
    return CheckContext(root, config.CheckSettings(nhc_config="/etc/nhc/nhc.conf"))


def run(context: CheckContext) -> CheckResult:
    return CheckRunner([nhc_config.CHECK], context, SystemClock()).run_one(nhc_config.CHECK)


WELL = """
* || check_fs_mount_rw /
* || check_fs_used / 100%
* || check_ps_service -u root -S sshd
* || check_hw_cpuinfo 1 1 2
* || check_hw_physmem 1MB 1MB
* || check_hw_eth eth0
* || check_hw_ib 400
* || check_ps_loadavg 10
* || check_file_test -f -s /some/file
"""


def test_a_node_that_is_well(tmp_path: Path) -> None:
    result = run(node(tmp_path, WELL))
    assert (result.verdict, result.text) == ("pass", "9 lines of NHC hold")


def test_a_node_that_is_not(tmp_path: Path) -> None:
    result = run(node(tmp_path, f"{WELL}* || check_hw_eth eth1\n* || check_moab_rm\n"))
    assert [(str(one.severity), one.subject) for one in result.findings] == [
        ("monitor", "check_hw_eth eth1")
    ]
    assert "line 12: check_moab_rm is not known here" in result.text


def test_lines_that_are_not_understood_leave_it_unjudged(tmp_path: Path) -> None:
    result = run(node(tmp_path, f"{WELL}* || check_moab_rm\n"))
    assert result.verdict == "unjudged"
    assert result.text == "9 of 10 lines hold; line 11: check_moab_rm is not known here"


def test_without_a_file_there_is_nothing_to_judge(tmp_path: Path) -> None:
    assert run(CheckContext(tmp_path)).text == "checks.nhc_config names no file"
    missing = CheckContext(tmp_path, config.CheckSettings(nhc_config="/gone"))
    assert run(missing).verdict == "unjudged"


def test_what_a_line_may_ask_for() -> None:
    with pytest.raises(ConfigError, match="nhc_asks_for"):
        config.parse('[checks]\nnhc_asks_for = "job"\n')


def test_a_file_that_any_user_may_write_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "nhc.conf"
    file.write_text("* || check_file_test -e /no/such/file\n")
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/hostname").write_text("n1\n")
    settings = config.CheckSettings(nhc_config="/nhc.conf", nhc_asks_for="replace")
    context = CheckContext(tmp_path, settings)
    (outcome,) = nhc_config.probe(context)
    assert outcome.trouble
    file.chmod(0o666)
    with pytest.raises(Unjudged, match="may be written by others"):
        nhc_config.probe(context)
