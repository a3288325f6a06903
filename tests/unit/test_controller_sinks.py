"""Sinks of events: each event once and in order where all is well, and at least once where not."""

from __future__ import annotations

import errno
import http.server
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.config import ConfigError, SinkSettings, parse
from slurm_resilience.controller.decide.hints import failing_sinks
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.observe import ClusterSnapshot, SiteFacts
from slurm_resilience.controller.sinks import delivery as rules
from slurm_resilience.controller.sinks.delivery import Delivery
from slurm_resilience.controller.sinks.event_sink import ALIVE, EventSink, make_sink
from slurm_resilience.controller.sinks.outflow import Outflow, Pulse, SinkWorker
from slurm_resilience.errors import SresError

START = 1_000_000.0


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.moment = 1000.0
        self.date = START

    def now(self) -> float:
        return self.date

    def monotonic(self) -> float:
        return self.moment

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.move(seconds)
        return event.is_set()

    def move(self, seconds: float) -> None:
        self.moment += seconds
        self.date += seconds


class MoodySink:
    """A sink that refuses while it is told to."""

    def __init__(self) -> None:
        self.refuses = False
        self.took: list[dict[str, Any]] = []

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        if self.refuses:
            raise SresError("it is closed on Sundays")
        self.took += events

    @property
    def texts(self) -> list[str]:
        return [event["text"] for event in self.took if event["kind"] != ALIVE]


class Site:
    """A journal, a clock, and workers on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = HandClock()
        self.journal = Journal(directory / "journal.db")
        self.pulse = Pulse()

    def worker(self, sink: EventSink, settings: SinkSettings | None = None) -> SinkWorker:
        settings = settings or SinkSettings(file="/unused")
        return SinkWorker("log", settings, sink, self.directory, "c1", self.clock, self.pulse)

    def write(self, *texts: str, kind: str = "detected") -> None:
        for text in texts:
            self.journal.event(self.clock.now(), kind, text, node="n1")

    def beat(self) -> None:
        self.pulse.moment, self.pulse.sentence = self.clock.monotonic(), "all is well"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.journal.close()


def drain(worker: SinkWorker) -> None:
    while worker.step():
        pass


def test_a_new_sink_gets_what_is_written_from_now_on(site: Site) -> None:
    site.write("long ago")
    worker, sink = (site.worker(sink := MoodySink()), sink)
    drain(worker)
    site.write("now", "and then")
    drain(worker)
    assert sink.texts == ["now", "and then"]
    assert {event["cluster"] for event in sink.took} == {"c1"}
    worker.close()


def test_a_restart_goes_on_where_it_was(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    site.write("first")
    drain(worker)
    worker.close()
    site.write("while sresctld was away")
    again = site.worker(sink)
    drain(again)
    assert sink.texts == ["first", "while sresctld was away"]
    again.close()


def test_a_new_sink_that_was_away_gets_what_came_before_a_restart(site: Site) -> None:
    sink = MoodySink()
    sink.refuses = True
    site.beat()
    worker = site.worker(sink)
    drain(worker)
    site.write("unheard")
    worker.close()
    sink.refuses = False
    again = site.worker(sink)
    drain(again)
    assert sink.texts == ["unheard"]
    again.close()


def test_a_sink_that_refuses_gets_all_of_it_later(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    sink.refuses = True
    site.write(*(f"event {n}" for n in range(250)))
    drain(worker)
    assert not worker.step()  # not tried again at once
    sink.refuses = False
    site.clock.move(rules.LONGEST_RETRY_SECONDS)
    drain(worker)
    assert sink.texts == [f"event {n}" for n in range(250)]
    worker.close()


def test_an_alarm_tells_of_a_sink_that_takes_nothing(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    sink.refuses = True
    site.write("unheard")
    for _ in range(10):
        worker.step()
        site.clock.move(rules.LONGEST_RETRY_SECONDS)
    assert "it is closed on Sundays" in worker.trouble()
    snapshot = ClusterSnapshot(
        now=START,
        moment=0.0,
        nodes={},
        jobs={},
        site=SiteFacts(failing_sinks=(("log", worker.trouble()),)),
    )
    (alarm,) = failing_sinks(snapshot)
    assert alarm.key == "sink-log" and "has taken no event for 10 min" in alarm.text
    sink.refuses = False
    drain(worker)
    assert worker.trouble() == "" and sink.texts == ["unheard"]
    worker.close()


def test_a_full_disk_silences_no_command_for_good(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pager of which nothing is heard any more, and nothing says so."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    paged = tmp_path / "paged"
    page = SinkSettings(command=("/bin/sh", "-c", f"cat >>{paged}"))
    worker = site.worker(make_sink(page), page)
    drain(worker)
    site.write("unheard")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", full)
        for _ in range(10):
            assert not worker.step()
            site.clock.move(rules.LONGEST_RETRY_SECONDS)
    assert "No space left" in worker.trouble()
    drain(worker)
    assert worker.trouble() == "" and "unheard" in paged.read_text()
    worker.close()


def test_a_journal_that_could_not_be_read_for_a_moment_is_no_lasting_trouble(site: Site) -> None:
    worker = site.worker(MoodySink())
    drain(worker)
    journal, worker._journal = worker._journal, None
    file, worker._journal_file = worker._journal_file, site.directory / "none" / "\0"
    worker.step()
    worker._journal, worker._journal_file = journal, file
    site.clock.move(2 * rules.TROUBLE_AFTER_SECONDS)
    assert worker.trouble()
    drain(worker)
    assert not worker.trouble()
    worker.close()


def test_a_date_that_jumps_back_does_not_silence_a_sink(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    sink.refuses = True
    site.write("one")
    drain(worker)
    sink.refuses = False
    site.clock.date -= 86400.0
    site.clock.move(rules.LONGEST_RETRY_SECONDS)
    drain(worker)
    assert sink.texts == ["one"]
    worker.close()


def test_only_the_kinds_that_were_asked_for(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink, SinkSettings(file="/unused", kinds=("alarm",)))
    drain(worker)
    site.write("a detail")
    site.write("wake up", kind="alarm")
    site.write("another detail")
    drain(worker)
    assert sink.texts == ["wake up"]
    worker.close()


def test_what_is_older_than_a_day_is_not_sent(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    sink.refuses = True
    site.write("too old")
    drain(worker)
    site.clock.move(rules.GIVE_UP_SECONDS + 1)
    site.write("fresh")
    sink.refuses = False
    drain(worker)
    assert sink.texts == ["fresh"]
    worker.close()


def test_an_older_journal_that_was_put_back_is_followed(site: Site) -> None:
    sink = MoodySink()
    (site.directory / "sinks").mkdir()
    (site.directory / "sinks" / "log").write_text('{"sent": 900}')
    site.write("known already")
    worker = site.worker(sink)
    drain(worker)
    site.write("new")
    drain(worker)
    assert sink.texts == ["new"]
    worker.close()


def test_alive_comes_at_the_start_and_then_as_often_as_asked(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink, SinkSettings(file="/unused", heartbeat=30.0))
    drain(worker)
    assert sink.took == []  # no cycle has ended yet
    for _ in range(9):
        site.beat()
        drain(worker)
        site.clock.move(10.0)
    assert [event["kind"] for event in sink.took] == [ALIVE] * 3
    assert sink.took[0]["text"] == "all is well"
    worker.close()


def test_alive_stays_out_when_no_cycle_ends(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink, SinkSettings(file="/unused", heartbeat=30.0))
    site.beat()
    drain(worker)
    site.clock.move(rules.PULSE_SECONDS + 1)
    drain(worker)
    assert len(sink.took) == 1
    worker.close()


def test_a_programs_command_line_is_not_sent(site: Site) -> None:
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    site.write("replace --token s3cret n1", kind="replacing")
    drain(worker)
    assert "s3cret" not in json.dumps(sink.took)
    worker.close()


@given(
    st.lists(st.sampled_from(["write", "send", "refuse", "take", "restart", "wait"]), max_size=60)
)
def test_whatever_happens_each_event_arrives_in_order(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str]
) -> None:
    site = Site(tmp_path_factory.mktemp("sink"))
    sink = MoodySink()
    worker = site.worker(sink)
    drain(worker)
    site.write("0")
    drain(worker)
    written = 1
    for act in acts:
        if act == "write":
            site.write(str(written))
            written += 1
        elif act == "send":
            worker.step()
        elif act == "restart":
            worker.close()
            worker = site.worker(sink)
        elif act == "wait":
            site.clock.move(7.0)
        else:
            sink.refuses = act == "refuse"
    sink.refuses = False
    site.clock.move(rules.LONGEST_RETRY_SECONDS)
    drain(worker)
    worker.close()
    site.journal.close()
    assert sink.texts == [str(number) for number in range(written)]


@given(st.integers(0, 50))
def test_the_wait_for_another_try_is_bounded(failures: int) -> None:
    delivery = rules.refused(Delivery(1, failures=failures, failing_since=5.0), "no", 100.0)
    wait = delivery.retry_at - 100.0
    assert rules.FIRST_RETRY_SECONDS <= wait <= rules.LONGEST_RETRY_SECONDS
    assert delivery.failing_since == 5.0


EVENTS = [{"kind": "alarm", "text": "n1 is dead"}, {"kind": "alarm", "text": "n2 ♥"}]


def test_a_file_gets_a_line_for_each_event(tmp_path: Path) -> None:
    path = tmp_path / "events"
    sink = make_sink(SinkSettings(file=str(path)))
    sink.send(EVENTS)
    path.rename(tmp_path / "events.1")
    sink.send(EVENTS[:1])
    assert [json.loads(line) for line in (tmp_path / "events.1").open()] == EVENTS
    assert json.loads(path.read_text()) == EVENTS[0]
    assert stat.S_IMODE(path.stat().st_mode) & 0o027 == 0


def test_a_line_that_a_full_disk_has_torn_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "events", os.write
    sink = make_sink(SinkSettings(file=str(path)))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, text: write(file, text[:20]))
        with pytest.raises(SresError, match="the disk is full"):
            sink.send(EVENTS)
    sink.send(EVENTS)
    torn, *lines = path.read_text().splitlines()
    assert len(torn) == 20 and [json.loads(line) for line in lines] == EVENTS


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "missing folder"])
def test_a_file_that_is_none_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/null")
    elif kind == "folder":
        path.mkdir()
    else:
        path = path / "events"
    with pytest.raises(SresError, match="events"):
        make_sink(SinkSettings(file=str(path))).send(EVENTS)


def test_a_command_gets_the_events_on_its_input(tmp_path: Path) -> None:
    sink = make_sink(SinkSettings(command=("/bin/sh", "-c", f"cat > {tmp_path}/got")))
    sink.send(EVENTS)
    assert [json.loads(line) for line in (tmp_path / "got").open()] == EVENTS


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'no route to pager' >&2; exit 3", "ended with 3: no route to pager"),
        ("sleep 60 & wait", "no end within 0.3 s; it was killed"),
    ],
)
def test_a_command_that_fails_is_told_of(script: str, message: str) -> None:
    with pytest.raises(SresError, match=message):
        make_sink(SinkSettings(command=("/bin/sh", "-c", script), timeout=0.3)).send(EVENTS)


def test_a_command_that_does_not_exist_is_told_of() -> None:
    with pytest.raises(SresError, match="/no/such cannot be started"):
        make_sink(SinkSettings(command=("/no/such",))).send(EVENTS)


class Receiver(http.server.BaseHTTPRequestHandler):
    """A web server that answers as its server object says."""

    def do_POST(self) -> None:
        answers: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answers.got.append((self.path, dict(self.headers), json.loads(body)))
        self.send_response(answers.code)
        if answers.code == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.code, server.got = 204, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_address_gets_a_post(receiver: Any) -> None:
    make_sink(SinkSettings(url=f"http://127.0.0.1:{receiver.server_port}/hook")).send(EVENTS)
    ((path, headers, body),) = receiver.got
    assert path == "/hook" and body == {"events": EVENTS}
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("code", [302, 400, 500])
def test_an_address_that_does_not_take_it_is_told_of(receiver: Any, code: int) -> None:
    receiver.code = code
    sink = make_sink(SinkSettings(url=f"http://127.0.0.1:{receiver.server_port}/hook"))
    with pytest.raises(SresError, match=f"it answered {code}"):
        sink.send(EVENTS)
    assert len(receiver.got) == 1


def test_an_address_at_which_nothing_listens_is_told_of(receiver: Any) -> None:
    with pytest.raises(SresError, match="refused"):
        make_sink(SinkSettings(url="http://127.0.0.1:1/hook")).send(EVENTS)


@pytest.mark.parametrize("token", [b"s3cret\nof two lines", b"s3cr\x7fet", b"s\xc3\xa9cret", b"\n"])
def test_a_token_that_is_none_is_never_named(tmp_path: Path, token: bytes) -> None:
    """The error goes to the log, and to an alarm that all users may read."""
    file = tmp_path / "token"
    file.write_bytes(token)
    sink = make_sink(SinkSettings(url="https://127.0.0.1:1/", token_file=str(file)))
    with pytest.raises(SresError, match=f"token_file {file} must hold one line") as refused:
        sink.send(EVENTS)
    assert "cr" not in str(refused.value)


def test_an_address_that_cannot_be_used_is_never_named() -> None:
    """Many addresses of web hooks are secrets themselves."""
    for url in ("http://127.0.0.1:1/services/ T0S3CRET", "http://[T0S3CRET/x", "http://a:S3CRET/"):
        with pytest.raises(SresError) as refused:
            make_sink(SinkSettings(url=url)).send(EVENTS)
        assert "S3CRET" not in str(refused.value)


def test_the_threads_send_what_cycles_wrote(site: Site, receiver: Any, tmp_path: Path) -> None:
    from slurm_resilience.clock import SYSTEM_CLOCK

    path = tmp_path / "events"
    settings = {
        "log": SinkSettings(file=str(path)),
        "web": SinkSettings(url=f"http://127.0.0.1:{receiver.server_port}/hook"),
        "hangs": SinkSettings(command=("/bin/sleep", "60"), timeout=0.1),
    }
    site.clock.date = SYSTEM_CLOCK.now()
    outflow = Outflow(settings, tmp_path, "c1", SYSTEM_CLOCK)
    outflow.cycle_ended("nothing to do")
    outflow.start()
    outflow.stop()
    assert json.loads(path.read_text())["kind"] == ALIVE
    assert [body["events"][0]["kind"] for _, _, body in receiver.got] == [ALIVE]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[sinks.a]", "exactly one of url, command and file"),
        ('[sinks.a]\nfile = "/x"\nurl = "https://x"', "exactly one of url, command and file"),
        ('[sinks.a]\nurl = "ftp://x"', "sinks.a.url must begin with https:// or http://"),
        ('[sinks.a]\nurl = "http://x"\ntoken_file = "/t"', "an https:// url only"),
        ('[sinks.a]\nfile = "events"', "sinks.a.file must be an absolute path"),
        ('[sinks.a]\ncommand = ["page"]', "sinks.a.command must be an absolute path"),
        ('[sinks."../a"]\nfile = "/x"', "letters, digits, - and _"),
        ('[sinks.a]\nfile = "/x"\ntimeout = 0.0', "sinks.a.timeout must be greater than 0"),
        ('[sinks.a]\nfile = "/x"\ntimeout = 10000.0', "at most 120 seconds"),
        ('[sinks.a]\nfile = "/x"\nheartbeat = nan', "sinks.a.heartbeat must be 0, or 1 to"),
        ('[sinks.a]\nfiel = "/x"', "fiel"),
    ],
)
def test_a_wrong_sink_is_refused_with_one_line(table: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(table)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_sinks_are_read() -> None:
    config = parse(
        '[sinks.pager]\ncommand = ["/bin/page", "-v"]\nkinds = ["alarm"]\nheartbeat = 60'
    )
    assert config.sinks["pager"].command == ("/bin/page", "-v")
