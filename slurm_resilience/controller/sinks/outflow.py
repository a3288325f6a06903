"""The threads that send events out of sresctld, one for each sink."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import SinkSettings
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.sinks import delivery as rules
from slurm_resilience.controller.sinks.delivery import Delivery
from slurm_resilience.controller.sinks.event_sink import EventSink, alive, as_sent, make_sink
from slurm_resilience.errors import SresError

log = logging.getLogger("sresctld.sinks")

LOOK_SECONDS = 0.5
"""Between two looks for new events when no cycle has ended."""
END_SECONDS = 2.0
"""The time that the threads get to send the rest when sresctld ends."""


class Pulse:
    """The last cycle's end and its sentence, as the threads see them."""

    def __init__(self) -> None:
        self.moment = 0.0
        self.sentence = ""


class SinkWorker:
    """One sink: `step` sends what is there."""

    def __init__(
        self,
        name: str,
        settings: SinkSettings,
        sink: EventSink,
        state_dir: Path,
        cluster: str,
        clock: Clock,
        pulse: Pulse,
    ) -> None:
        self.name = name
        self._settings = settings
        self._sink = sink
        self._cluster = cluster
        self._clock = clock
        self._pulse = pulse
        self._journal_file = state_dir / "journal.db"
        self._file = state_dir / "sinks" / name
        self._journal: Journal | None = None
        self._progress = Delivery(0)
        self._is_placed = False
        """The place in the journal from which on it is sent is known."""
        self._busy_since = 0.0

    def step(self) -> bool:
        """Send one batch, or `alive`; returns whether there may be more."""
        moment = self._clock.monotonic()
        if moment < self._progress.retry_at:
            return False
        self._busy_since = moment
        try:
            has_more = self._send(self._begun(), moment)
        except (SresError, sqlite3.Error) as error:
            text = str(error)
        except Exception as error:  # a full /tmp, say: a thread that ends is silent for good
            text = f"{type(error).__name__}: {error}"
        else:
            return has_more
        finally:
            self._busy_since = 0.0
        if self._progress.error != text:
            log.warning("sink %s: %s; it is tried again", self.name, text)
        self._progress = rules.refused(self._progress, text, moment)
        return False

    def trouble(self) -> str:
        """Return why people cannot rely on this sink; empty: they can."""
        return rules.trouble(self._progress, self._busy_since, self._clock.monotonic())

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _begun(self) -> Journal:
        """Open the journal in the thread that reads it, and find the sink's place in it."""
        if self._journal is None:
            self._journal = Journal(self._journal_file)
        if not self._is_placed:
            sent = _read_sent(self._file, self._journal.newest_event())
            self._progress = msgspec.structs.replace(self._progress, sent=sent)
            # Of a new sink that takes nothing yet: what happens before a restart is its too.
            self._write_sent(sent)
            self._is_placed = True
        return self._journal

    def _send(self, journal: Journal, moment: float) -> bool:
        now = self._clock.now()
        if rules.wants_alive(self._progress, self._settings.heartbeat, self._pulse.moment, moment):
            self._sink.send([alive(self._cluster, self._pulse.sentence, now)])
            self._note_success()
            self._progress = Delivery(self._progress.sent, alive_at=moment)
            return True
        newest = journal.newest_event()
        progress = rules.rewound(self._progress, newest)
        events = journal.events_after(progress.sent, self._settings.kinds, rules.MAX_BATCH_EVENTS)
        fresh, dropped = rules.split_by_age(events, now)
        if dropped:
            log.warning("sink %s: %d events are more than a day old: not sent", self.name, dropped)
        if fresh:
            self._sink.send([as_sent(event, self._cluster) for event in fresh])
        # Without a match there is nothing up to the newest event that this sink is to get.
        up_to = events[-1]["id"] if events else newest
        if events:
            self._write_sent(up_to)
        if fresh:
            self._note_success()
        # Also without an event: what failed was the journal, which can be read again.
        self._progress = rules.taken(progress, up_to)
        return bool(events)

    def _note_success(self) -> None:
        if self._progress.failures:
            log.info("sink %s takes events again", self.name)

    def _write_sent(self, number: int) -> None:
        _write_sent(self._file, number)


def place_sinks(state_dir: Path, names: Iterable[str], number: int) -> None:
    """Have sinks send what follows an event: another machine's sresctld sent what was before.

    Args:
        state_dir: sresctld's.
        names: of the sinks.
        number: the id of the event.
    """
    for name in names:
        _write_sent(state_dir / "sinks" / name, number)


def _write_sent(file: Path, number: int) -> None:
    """Remember the progress over a restart. Where that fails, the next start sends again."""
    new = file.with_suffix(".new")
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True, mode=0o750)
        new.write_text(json.dumps({"sent": number}), encoding="ascii")
        new.replace(file)


def _read_sent(file: Path, newest: int) -> int:
    """Return the id of the last event that was sent; of a new sink, the newest there is."""
    try:
        return int(json.loads(file.read_text(encoding="ascii"))["sent"])
    except (OSError, ValueError, KeyError, TypeError):
        return newest


class Outflow:
    """All sinks of a sresctld."""

    def __init__(
        self, settings: Mapping[str, SinkSettings], state_dir: Path, cluster: str, clock: Clock
    ) -> None:
        self._clock = clock
        self._pulse = Pulse()
        self._ended = threading.Event()
        self._workers = [
            SinkWorker(name, each, make_sink(each), state_dir, cluster, clock, self._pulse)
            for name, each in settings.items()
        ]
        self._threads = [
            threading.Thread(
                target=self._run, args=(worker,), name=f"sink-{worker.name}", daemon=True
            )
            for worker in self._workers
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def cycle_ended(self, sentence: str) -> None:
        """Hear that a cycle has ended: what it wrote is sent within half a second."""
        self._pulse.sentence = sentence
        self._pulse.moment = self._clock.monotonic()

    def troubles(self) -> tuple[tuple[str, str], ...]:
        """Return the names of the sinks that people cannot rely on, each with the reason."""
        return tuple((w.name, text) for w in self._workers if (text := w.trouble()))

    def stop(self) -> None:
        """Let the threads send what is there, for a moment."""
        self._ended.set()
        deadline = self._clock.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _run(self, worker: SinkWorker) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._clock.wait(self._ended, LOOK_SECONDS)
                while worker.step():
                    pass
        finally:
            worker.close()
