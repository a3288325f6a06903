"""All that was gathered about a hang, and the rank and node that it names. Pure.

What says most comes first: the Flight Recorder's dumps, which show who did not join a collective;
then a rank whose process is gone, stopped, or in the kernel for good; then a rank that has reported
an earlier step than the others; then the only one that does another thing than all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from slurm_resilience.flight.culprit import HangDiagnosis, ranks_in_words
from slurm_resilience.resume.progress.hang_rule import ANY_RANK, Stall, ranks_behind

TRACED, STOPPED, IN_KERNEL, GONE = "t", "T", "D", "Z"
"""States of processes, as /proc has them: held by a debugger, stopped by a signal, in the kernel
where no signal reaches it, ended and not waited for."""
BUSY_SHARE = 0.5
"""A share of one core; with more a process computes, with less it waits."""
ENOUGH_TO_DIFFER = 3
"""Ranks of which one may be the odd one out."""
NAMES = "hang.json"
"""The file in a hang's directory."""


class ProcessSign(msgspec.Struct, frozen=True):
    """One process of a rank, as its node saw it. Empty: the kernel does not tell."""

    pid: int
    rank: int
    state: str
    command: str = ""
    kernel_function: str = ""
    """The one in which it waits (wchan)."""
    system_call: str = ""
    kernel_stack: tuple[str, ...] = ()
    python_stack: tuple[str, ...] = ()
    """Functions of its main thread, the innermost first (py-spy)."""
    core_share: float = 0.0
    """Its part of one core, in the moment in which it was looked at."""


class NodeSigns(msgspec.Struct, frozen=True):
    """All that one node tells."""

    node: str
    processes: tuple[ProcessSign, ...] = ()
    dumps: tuple[str, ...] = ()
    """Files of the Flight Recorder that it has copied."""
    ras: str = ""
    """The words of NCCL's own service, shortened."""
    left_out: int = 0
    """Processes beyond the limit."""


class HangEvidence(msgspec.Struct, frozen=True):
    """All that was gathered about one hang."""

    stall: Stall
    nodes: dict[int, str]
    """The node of each rank, as far as it is known."""
    signs: tuple[NodeSigns, ...] = ()
    silent_nodes: tuple[str, ...] = ()
    """Nodes that were asked, and did not answer in time."""
    directory: str = ""
    """The place in which all of it is kept; empty: none."""


HangSource = Literal["dumps", "process", "silent-node", "behind", "differs", "none"]


class NamedCulprit(msgspec.Struct, frozen=True):
    """The rank that keeps the others waiting."""

    source: HangSource
    reason: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """Return the only node at fault; empty: there are several, or it is not known."""
        return self.nodes[0] if len(self.nodes) == 1 else ""


class FoundHang(msgspec.Struct, frozen=True):
    """A hang, for which the step is ended."""

    reason: str
    node: str = ""
    """The only node at fault; empty: none, or several."""


def name_culprit(evidence: HangEvidence, dumps: HangDiagnosis | None = None) -> NamedCulprit:
    """Return the culprit of a hang.

    Args:
        evidence: that was gathered.
        dumps: what the Flight Recorder's dumps say; None: there are none.
    """
    ranks = _nodes_of_ranks(evidence)
    return (
        _by_dumps(dumps, ranks)
        or _by_process(evidence, ranks)
        or _by_silence(evidence, ranks)
        or _by_step(evidence.stall, ranks)
        or _by_difference(evidence, ranks)
        or NamedCulprit("none", "no rank is told from the others")
    )


def is_debugged(evidence: HangEvidence) -> bool:
    """Return whether a debugger holds a process: a person looks at it, and it stands still."""
    return any(one.state == TRACED for signs in evidence.signs for one in signs.processes)


def stack_lines(evidence: HangEvidence, ranks: Collection[int] = ()) -> list[str]:
    """Return a line for each way in which processes stand, the rarest first.

    Args:
        evidence: that was gathered.
        ranks: those that come first.
    """
    where: dict[str, list[int]] = {}
    for signs in evidence.signs:
        for rank, process in _main_processes(signs).items():
            where.setdefault(_place(process), []).append(rank)
    first = sorted(where.items(), key=lambda item: (not set(item[1]) & set(ranks), len(item[1])))
    return [f"{ranks_in_words(sorted(found))}: {place}" for place, found in first]


def hang_in_words(stall: Stall, culprit: NamedCulprit) -> str:
    """Return the cause of an end by a hang, for the log and the history."""
    return (
        f"it hung: no step for {stall.seconds:.0f} s after step {stall.last_step}; "
        f"{culprit_in_words(culprit)}"
    )


def culprit_in_words(culprit: NamedCulprit) -> str:
    """Return the rank at fault with its node."""
    where = f" ({', '.join(culprit.nodes)})" if culprit.nodes else ""
    return f"{culprit.reason}{where}"


def _nodes_of_ranks(evidence: HangEvidence) -> dict[int, str]:
    seen = {p.rank: signs.node for signs in evidence.signs for p in signs.processes}
    return evidence.nodes | seen


def _named(
    source: HangSource, ranks: Sequence[int], known: Mapping[int, str], reason: str
) -> NamedCulprit:
    nodes = tuple(sorted({known[rank] for rank in ranks if known.get(rank)}))
    return NamedCulprit(source, reason, tuple(ranks), nodes)


def _by_dumps(dumps: HangDiagnosis | None, known: Mapping[int, str]) -> NamedCulprit | None:
    if dumps is None or dumps.kind == "none" or not dumps.culprits:
        return None
    nodes = {one.rank: one.node for one in dumps.culprits if one.node}
    ranks = [one.rank for one in dumps.culprits]
    return _named("dumps", ranks, {**known, **nodes}, dumps.reason)


_STANDS = {
    STOPPED: "is stopped by a signal",
    IN_KERNEL: "hangs in the kernel, where no signal reaches it",
    GONE: "has ended, and its parent does not notice",
}


def _by_process(evidence: HangEvidence, known: Mapping[int, str]) -> NamedCulprit | None:
    found: dict[str, list[int]] = {}
    seen: set[int] = set()
    for signs in evidence.signs:
        for rank, process in _main_processes(signs).items():
            seen.add(rank)
            if process.state in _STANDS:
                found.setdefault(process.state, []).append(rank)
    answered = {signs.node for signs in evidence.signs if not signs.left_out}
    told = [rank for rank in evidence.stall.steps if rank != ANY_RANK]
    # One rank may tell for many: a rank without a process is none where others are missing too.
    gone = [rank for rank in told if rank not in seen and known.get(rank) in answered]
    if gone and 2 * len(gone) < len(told):
        return _named("process", gone, known, f"{ranks_in_words(gone)} has no process any more")
    for state in (GONE, IN_KERNEL, STOPPED):
        ranks = sorted(found.get(state, ()))
        # Where most are alike, they wait for something that all of them use.
        if (ranks and 2 * len(ranks) < len(seen)) or len(ranks) == 1:
            return _named("process", ranks, known, f"{ranks_in_words(ranks)} {_STANDS[state]}")
    return None


def _by_silence(evidence: HangEvidence, known: Mapping[int, str]) -> NamedCulprit | None:
    """Name a node that runs nothing new while the others answer."""
    silent = evidence.silent_nodes
    if not silent or 2 * len(silent) >= len(silent) + len(evidence.signs):
        return None
    ranks = sorted(rank for rank, node in known.items() if node in silent)
    text = f"{', '.join(silent)} did not answer when its stacks were asked for"
    return NamedCulprit("silent-node", text, tuple(ranks), silent)


def _by_step(stall: Stall, known: Mapping[int, str]) -> NamedCulprit | None:
    behind = ranks_behind(stall.steps)
    if not behind:
        return None
    at = stall.steps[behind[0]]
    text = f"{ranks_in_words(behind)} reported step {at}, the others {stall.last_step}"
    return _named("behind", behind, known, text)


def _by_difference(evidence: HangEvidence, known: Mapping[int, str]) -> NamedCulprit | None:
    """Name the only rank that computes while all wait, or waits elsewhere than all others."""
    main = {
        rank: process
        for signs in evidence.signs
        for rank, process in _main_processes(signs).items()
    }
    if len(main) < ENOUGH_TO_DIFFER:
        return None
    kinds = {rank: _kind(process) for rank, process in main.items()}
    rarest = Counter(kinds.values()).most_common()
    if len(rarest) != 2 or rarest[1][1] != 1:
        return None
    (odd,) = [rank for rank, kind in kinds.items() if kind == rarest[1][0]]
    text = f"rank {odd} alone stands elsewhere: {_place(main[odd])}"
    return _named("differs", [odd], known, text)


def _main_processes(signs: NodeSigns) -> dict[int, ProcessSign]:
    """Return each rank's own process: the first that the node names, which is the largest."""
    found: dict[int, ProcessSign] = {}
    for process in signs.processes:
        found.setdefault(process.rank, process)
    return found


def _kind(process: ProcessSign) -> str:
    if process.python_stack:
        return process.python_stack[0].partition(" (")[0]
    if process.core_share >= BUSY_SHARE:
        return "computes"
    return process.system_call.partition(" ")[0] or process.kernel_function or process.state


def _place(process: ProcessSign) -> str:
    """Return in one line where a process stands."""
    parts = [" < ".join(process.python_stack[:4])] if process.python_stack else []
    if not parts and process.core_share >= BUSY_SHARE:
        parts.append("computes")
    if process.kernel_function not in ("", "0"):
        parts.append(f"in the kernel's {process.kernel_function}")
    if process.kernel_stack and process.state == IN_KERNEL:
        parts.append(" < ".join(process.kernel_stack[:4]))
    return ", ".join(parts) or f"state {process.state} in {process.command or 'its program'}"
