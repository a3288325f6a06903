"""A plugin of pytest for scripts/test: which tests may be skipped, and what else went wrong.

With CI=true a skip whose reason is not excused here is a failure: on a machine that was set up by
scripts/test everything else has to run. A failure is named as it happens, in one line; pytest by
itself names it at the end of the run. A first try that failed is told in full at the end: what
fails only now and then is best understood when it does.
"""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Generator

import hypothesis
import pytest

EXCUSED = (
    r"GPU|NVML's library|NVIDIA|NCCL|CUDA",
    r"pyslurm",
    r"the fake ",
    r"/dev/kmsg",
    r"^excused: .*srun",
    r"recorded samples are not beside this tree|published scripts are not at hand",
    r"systemd-analyze",
    r"root may write everywhere",
    r"this kernel waits for no write",
)
"""Regular expressions, searched in the reason: what no machine has to have."""

# A script that starts this in its background has it ignore Ctrl-C, and with it all that is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest's workers are told how wide the terminal is, and what is tested would believe it.
os.environ.pop("COLUMNS", None)
# How long one example takes says nothing on such a machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

_EXCUSED = re.compile("|".join(EXCUSED), re.IGNORECASE)
_skipped = set[str]()
_LONGEST_MESSAGE = 200
_LONGEST_STORY = 8000


class _Announcer:
    """Prints each failure at once. Not in xdist's workers, which have no terminal."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._first_tries: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name the test that failed, and why."""
        # pytest-rerunfailures' word for a failure that is tried again.
        if str(report.outcome) == "rerun":
            self._first_tries.append(report)
            self._say("TRIED AGAIN", report)
        if report.failed:
            self._say("FAILED" if report.when == "call" else f"FAILED in its {report.when}", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Name the file that could not be loaded."""
        if report.failed:
            self._say("FAILED to load", report)

    def pytest_terminal_summary(self) -> None:
        """Tell why each first try failed, since nothing else does."""
        for report in self._first_tries:
            self._terminal.section(f"first try: {report.nodeid}", "_")
            self._terminal.write_line(report.longreprtext[-_LONGEST_STORY:])

    def _say(self, what: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
        line = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
        self._terminal.ensure_newline()
        # With -q or -n that one does not know of the letters before.
        if self._terminal._tw.width_of_current_line:
            self._terminal.line("")
        self._terminal.write_line(f"{what}: {report.nodeid}: {line[:_LONGEST_MESSAGE]}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have failures announced where there is a terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Announcer(terminal), "announcer")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failure more plainly where Python cannot parse the source that it happened in.

    Python before 3.11.5 (gh-106905) loses count of its depth in `ast.parse`, and raises SystemError
    from then on: pytest would end with an internal error instead of naming the test.
    """
    try:
        return (yield)
    except SystemError:
        usual = item.config.option.tbstyle
        try:
            # Without sources: the second one does not even look for carets.
            item.config.option.tbstyle = "native"
            return pytest.TestReport.from_item_and_call(item, call)
        except SystemError:
            item.config.option.tbstyle = "line"
            return pytest.TestReport.from_item_and_call(item, call)
        finally:
            item.config.option.tbstyle = usual


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In CI, on a machine shared with strangers, a test that fails is repeated once: most of them
    start processes, clusters, or threads that must answer in time. pytest's closing line counts it
    as a rerun, and -ra names it."""
    if _ci():
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note why a test was skipped."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note why a whole file was skipped."""
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.add(reason.removeprefix("Skipped: "))


def _ci() -> bool:
    return os.environ.get("CI", "").lower() in ("true", "1")


def _unexcused() -> list[str]:
    if not _ci():
        return []
    return [reason for reason in sorted(_skipped) if not _EXCUSED.search(reason)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run for an unexcused skip; what complains when it is collected does so now."""
    gc.collect()
    if exitstatus == pytest.ExitCode.OK and _unexcused():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Before the closing line, besides the reasons that pytest's -ra gives: what makes it fail."""
    for reason in _unexcused():
        text = f"not excused by scripts/skips.py, and so an error in CI: {reason}"
        terminalreporter.write_line(text, red=True)
