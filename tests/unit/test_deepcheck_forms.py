"""Deep checks print what existing log parsers read, to the letter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurm_resilience.deepcheck import report_forms
from slurm_resilience.deepcheck.collective_math import (
    Collective,
    Sweep,
    SweepRow,
    algorithm_bandwidth,
    best_bus_bandwidth,
    bus_bandwidth,
    percentile,
    sweep_sizes,
    threshold_of,
)
from slurm_resilience.deepcheck.deep_logs import NodeLog
from slurm_resilience.deepcheck.loopback_rounds import (
    LoopbackFigures,
    lagging_devices,
    loopback_figures,
)
from slurm_resilience.deepcheck.report_forms import FaultyNodeLine
from slurm_resilience.errors import UsageError
from slurm_resilience.health.documents.dcgm_diag import judge_dcgm_diag
from slurm_resilience.health.documents.dcgm_facts import DcgmFacts, dcgm_facts
from slurm_resilience.health.documents.fio_result import fio_rate, judge_fio, recognises_fio
from slurm_resilience.health.documents.pingpong_text import PingpongRow, pingpong_rows

DCGM = """\
2024-08-20T22:25:02Z    info    DCGM diagnostic health summary:
  dcgmCheckLevel: 0
  dcgmVersion: 3.3.7
  gpuDriverVersion: 535.183.01
  gpuDeviceIds: [2237]
  replacementRequired: false
  rebootRequired: false"""

LOOPBACK = """\
2024-08-20T22:26:28Z    info    EFA Loopback check passed for device: rdmap0s29
  MaxBw: 58.590000
  AvgBw: 32.420000
  MaxTypicalLat: 30.870000
  MinTypicalLat: 20.080000
  AvgLat: 21.630000"""

TABLE_HEAD = """\
#       size         count      type   redop    root     time   algbw   busbw
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    353.9    0.00    0.00
"""

FAULTY = (
    '{"level": "error", "ts": "2024-06-18T21:15:22Z", "msg": "Encountered FaultyInstance. Replace '
    "the Instance. Region: us-west-2, InstanceType: p4d.24xlarge. ERROR:Bandwidth has less than "
    'threshold: Expected minimum threshold :80,NCCL Test output Bw: 30", "node": "n3"}'
)


def test_the_summary_of_dcgm() -> None:
    facts = DcgmFacts(0, "3.3.7", "535.183.01", ("2237",))
    assert report_forms.dcgm_summary("2024-08-20T22:25:02Z", facts) == DCGM


def test_the_figures_of_a_loopback() -> None:
    figures = LoopbackFigures(58.59, 32.42, 30.87, 20.08, 21.63)
    assert report_forms.loopback_summary("2024-08-20T22:26:28Z", "rdmap0s29", figures, True) == (
        LOOPBACK
    )
    failed = report_forms.loopback_summary("2024-08-20T22:26:28Z", "rdmap0s29", figures, False)
    assert "    error    EFA Loopback check failed for device: rdmap0s29\n" in failed


def test_the_table_of_a_collective() -> None:
    sweep = Sweep(Collective.ALL_REDUCE, 16, (SweepRow(8, 2, 353.9e-6),))
    table = report_forms.collective_table(sweep)
    assert table.startswith(TABLE_HEAD)
    assert "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : " in table
    wrong = Sweep(Collective.ALL_REDUCE, 2, (SweepRow(8, 2, 1e-3, wrong=1),))
    assert "\n# Out of bounds values : 1 FAILED\n" in report_forms.collective_table(wrong)


def test_the_average_has_six_digits() -> None:
    sweep = Sweep(Collective.ALL_REDUCE, 2, (SweepRow(488398, 122099, 1e-3),))
    assert report_forms.collective_table(sweep).endswith("# Avg bus bandwidth    : 0.488398")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(5.25e-6, "   5.25"), (353.9e-6, "  353.9"), (0.0123456, "  12346")],
)
def test_a_time_has_the_fewer_digits_the_longer_it_is(seconds: float, shown: str) -> None:
    sweep = Sweep(Collective.ALL_REDUCE, 2, (SweepRow(8, 2, seconds),))
    assert f"      -1  {shown}  " in report_forms.collective_table(sweep)


def test_the_line_of_a_faulty_node() -> None:
    line = report_forms.faulty_line(
        "2024-06-18T21:15:22Z", FaultyNodeLine("n3", "us-west-2", "p4d.24xlarge", 80.0, 30.0)
    )
    assert line == FAULTY
    assert set(json.loads(line)) == {"level", "ts", "msg", "node"}


# --- the formulas -----------------------------------------------------------------------------


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 1 GB in 10 ms over eight ranks.
    row = SweepRow(10**9, 10**9 // 4, 0.01)
    assert algorithm_bandwidth(row) == pytest.approx(100)
    assert bus_bandwidth(Collective.ALL_REDUCE, 8, row) == pytest.approx(175)
    assert bus_bandwidth(Collective.ALL_GATHER, 8, row) == pytest.approx(87.5)
    assert bus_bandwidth(Collective.ALL_REDUCE, 1, row) == pytest.approx(100)
    slower = SweepRow(8, 2, 1.0)
    assert best_bus_bandwidth(Sweep(Collective.ALL_REDUCE, 8, (slower, row))) == pytest.approx(175)


def test_sizes_rise_to_the_largest() -> None:
    assert sweep_sizes(8, 1000, 4) == (8, 32, 128, 512, 1000)
    assert sweep_sizes(8, 8, 2) == (8,)
    with pytest.raises(UsageError, match="do not rise"):
        sweep_sizes(16, 8, 2)


def test_a_threshold_asked_for_goes_before_the_table() -> None:
    assert threshold_of("p4d.24xlarge") == 80
    assert threshold_of("p4d.24xlarge", 120.0) == 120
    assert threshold_of("a type of our own") is None


# --- loopback ---------------------------------------------------------------------------------

PINGPONG = """\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      1k      =1k      125k        0.05s      2.61      24.50       0.04
1k      1k      =1k      1.9m        0.05s     41.79      24.50       0.04
1m      10      =10      20m         0.01s   2111.00     496.69       0.00
"""


def test_rows_of_a_pingpong() -> None:
    assert pingpong_rows(PINGPONG) == (
        PingpongRow(64, 2.61, 24.5),
        PingpongRow(1024, 41.79, 24.5),
        PingpongRow(1 << 20, 2111.0, 496.69),
    )
    assert pingpong_rows("[error] util/pingpong.c:408 : failed to connect") == ()


def test_typical_latencies_leave_the_outermost_rounds_out() -> None:
    # 21 rounds of 20 to 40 µs: the 5th percentile is 21, the 95th 39.
    rounds = [
        [PingpongRow(64, 10.0 + i, 20.0 + i), PingpongRow(1024, 50.0, 90.0)] for i in range(21)
    ]
    figures = loopback_figures(rounds)
    assert figures is not None
    assert (figures.min_typical_lat, figures.max_typical_lat) == (21.0, 39.0)
    assert figures.avg_lat == pytest.approx(30.0)
    assert (figures.max_bw, figures.avg_bw) == (50.0, 50.0)
    assert loopback_figures([[], []]) is None


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([7.0], 0.95) == 7.0


def test_a_device_far_below_its_siblings_lags() -> None:
    good = LoopbackFigures(100, 100, 1, 1, 1)
    slow = LoopbackFigures(40, 40, 1, 1, 1)
    assert lagging_devices({"a": good, "b": good, "c": slow}) == ("c",)
    assert lagging_devices({"a": good, "c": slow}) == ()


# --- documents --------------------------------------------------------------------------------


def test_facts_of_a_diagnostic_of_version_4() -> None:
    data = {
        "DCGM Diagnostic": {
            "test_categories": [
                {
                    "tests": [
                        {
                            "name": "memory",
                            "results": [
                                {
                                    "entity_group": "GPU",
                                    "entity_id": 0,
                                    "status": "Fail",
                                    "warnings": [{"warning": "bad", "error_severity": 2}],
                                }
                            ],
                        }
                    ]
                }
            ]
        },
        "entity_groups": [{"entities": [{"device_id": "2330"}, {"device_id": "2330"}]}],
        "metadata": {"Driver Version Detected": "580.82.09", "version": "4.2.3"},
    }
    facts = dcgm_facts(data, judge_dcgm_diag(data), 4)
    assert facts == DcgmFacts(4, "4.2.3", "580.82.09", ("2330",), True, False)


def test_facts_of_a_diagnostic_of_version_3() -> None:
    data = {
        "DCGM GPU Diagnostic": {
            "version": "3.3.7",
            "Driver Version Detected": "535.183.01",
            "GPU Device IDs": ["2237"],
            "test_categories": [{"tests": [{"name": "PCIe", "results": [{"status": "Pass"}]}]}],
        }
    }
    facts = dcgm_facts(data, judge_dcgm_diag(data), 0)
    assert report_forms.dcgm_summary("2024-08-20T22:25:02Z", facts) == DCGM


def fio(error: int = 0, rate: float = 2e8) -> dict[str, object]:
    job = {"jobname": "deepcheck", "error": error, "write": {"bw_bytes": rate}, "read": {}}
    return {"fio version": "fio-3.33", "jobs": [job]}


def test_fio_that_reads_back_something_else_replaces_the_node() -> None:
    assert recognises_fio(fio())
    assert judge_fio(fio()) == ((), (), ())
    assert fio_rate(fio(), "write") == 200
    (finding,) = judge_fio(fio(error=84)).findings
    assert finding.severity == "replace"
    (finding,) = judge_fio(fio(error=5)).findings
    assert (finding.severity, finding.text) == ("reboot", "input/output: EIO")
    assert judge_fio(fio(error=28)).unjudged == ("the place cannot be written to: ENOSPC",)
    assert judge_fio(fio(rate=0)).unjudged == ("nothing was written or read",)


def test_a_log_in_a_directory_of_users_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root would add to what a link leads to, and wait for ever at a pipe."""
    users, precious = tmp_path / "users", tmp_path / "precious"
    users.mkdir()
    users.chmod(0o1777)
    precious.write_text("precious")
    (users / "deep.log").symlink_to(precious)
    os.mkfifo(users / "pipe.log")
    for name in ("deep.log", "pipe.log"):
        NodeLog(str(users / name)).add("a line\n")
        assert "may be written by all users" in capsys.readouterr().err
    assert precious.read_text() == "precious"
