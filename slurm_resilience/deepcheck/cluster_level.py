"""The cluster level: a sweep over all nodes, then rounds of pairs that tell whose link is slow."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from slurm_resilience.deepcheck.collective_math import (
    Collective,
    Sweep,
    best_bus_bandwidth,
    threshold_of,
    wrong_elements,
)
from slurm_resilience.deepcheck.deep_results import (
    DeepOutcome,
    DeepResult,
    DeepState,
    NodeDeepCheck,
    advanced,
    end_of,
)
from slurm_resilience.deepcheck.instance_level import as_program
from slurm_resilience.deepcheck.node_choice import by_gpus, gpus_of, has_neuron
from slurm_resilience.deepcheck.pairing import (
    NodePair,
    PairingConclusion,
    PairMeasure,
    conclude,
    next_pairs,
)
from slurm_resilience.deepcheck.run_options import DeepRunOptions
from slurm_resilience.deepcheck.step_follower import StepFollower
from slurm_resilience.deepcheck.step_lines import GroupSwept, GroupTrouble, StepMessage
from slurm_resilience.deepcheck.step_requests import CollectiveRequest, RankGroup, RankHardware
from slurm_resilience.errors import ConfigError, UsageError
from slurm_resilience.health.profile_files import load_profile
from slurm_resilience.model import Node, Severity
from slurm_resilience.slurm.hostlists import expand, fold
from slurm_resilience.slurm.maintenance import StepOrder

PROGRAM = "slurm_resilience.deepcheck.torch_programs.collective_program"
PASSES_OF_A_PAIR = 3
"""The best counts: other work on a node may slow one of them, a slow link slows all."""
FIRST_PORT, PORTS = 20_000, 12_000
"""Neuron cores need the next two as well."""


class CollectiveBounds(NamedTuple):
    """The size and the time limits of a step."""

    largest_bytes: int
    """The largest message: large enough to fill the links."""
    sweep_seconds: float
    rank_seconds: float
    """A rank waits for the others so long."""
    step_seconds: float
    """The start of the step's programs included."""


BOUNDS: dict[RankHardware, CollectiveBounds] = {
    RankHardware.CPU: CollectiveBounds(4 << 20, 60.0, 120.0, 600.0),
    RankHardware.GPU: CollectiveBounds(1 << 30, 60.0, 120.0, 600.0),
    # Each size is a program of its own, which each node compiles the first time.
    RankHardware.NEURON: CollectiveBounds(256 << 20, 1500.0, 1800.0, 3600.0),
}


def hardware_of(gres: str, profile: str) -> RankHardware:
    """Return the hardware whose links are measured.

    Args:
        gres: a node's, as Slurm shows it.
        profile: a node type or a file; of a type without a profile Gres alone tells.
    """
    with contextlib.suppress(ConfigError):
        if profile and load_profile(profile).neuron_devices:
            return RankHardware.NEURON
    if has_neuron(gres):
        return RankHardware.NEURON
    return RankHardware.GPU if gpus_of(gres) else RankHardware.CPU


_NO_MEASURE = re.compile(
    r"CANCELLED AT \S+ \*|srun: .*(?:Unable to (?:allocate|confirm|create|contact)|been revoked)"
)
"""Slurm's words where a step tells nothing of its links: a person has cancelled it (not its time
limit, nor a node's failure), or slurmctld was away."""


class _NotMeasured(Exception):
    """A step was ended from outside, and no node is to blame for that."""


class ClusterFindings(NamedTuple):
    """The outcome of the cluster level."""

    nodes: tuple[NodeDeepCheck, ...]
    sweeps: tuple[Sweep, ...]
    isolation: PairingConclusion
    measured: dict[str, float]
    """The best bandwidth of each node with any other, GB/s."""
    trouble: str = ""
    """A fault of the whole that is no single node's."""


class ClusterLevel:
    """The measurements of one run."""

    def __init__(
        self, nodes: Sequence[Node], options: DeepRunOptions, tell: Callable[[str], None]
    ) -> None:
        """Compare nodes of one kind.

        Raises:
            UsageError: the nodes cannot be compared with each other.
        """
        if len(nodes) < 2:
            raise UsageError(
                f"the cluster level needs two nodes or more, and has {len(nodes)}: name more, or "
                "run --level instance"
            )
        kinds = by_gpus(nodes)
        if len(kinds) > 1:
            said = ", ".join(f"{fold(names)} ({gres or 'none'})" for gres, names in kinds.items())
            raise UsageError(f"the nodes have different GPUs: {said}; name nodes of one kind")
        self._nodes = {node.name: node for node in nodes}
        self._gres = next(iter(kinds))
        self._hardware = hardware_of(nodes[0].gres, options.profile)
        self._bounds = BOUNDS[self._hardware]
        # The cores of a node are its own business: its task starts a rank on each.
        is_gpu = self._hardware is RankHardware.GPU
        self._tasks_per_node = gpus_of(nodes[0].gres) if is_gpu else 1
        self._options = options
        self._tell = tell
        self._threshold = threshold_of(options.profile, options.threshold)
        self._sweeps: list[Sweep] = []
        self._missing: dict[str, str] = {}
        self._troubles: list[GroupTrouble] = []

    def run(self, reservation: str, follower: StepFollower) -> ClusterFindings:
        """Measure, and say whose link is slow."""
        try:
            names, rounds = self._measured(reservation, follower)
        except _NotMeasured as reason:
            self._tell(str(reason))
            why = dict.fromkeys(self._nodes, str(reason)) | self._missing
            told = [
                _ended(name, DeepResult("links", DeepOutcome.UNJUDGED, text))
                for name, text in why.items()
            ]
            nothing = PairingConclusion((), (), tuple(self._nodes), None)
            return ClusterFindings(tuple(told), tuple(self._sweeps), nothing, {})
        return self._conclusion(names, rounds)

    def _measured(
        self, reservation: str, follower: StepFollower
    ) -> tuple[list[str], list[list[PairMeasure]]]:
        names = list(self._nodes)
        while len(names) > 1:
            self._sweep(names, reservation, follower)
            able = [name for name in names if name not in self._missing]
            if self._sweeps or able == names:
                break
            # Those that lack torch kept the others from measuring.
            names = able
        names = [name for name in names if name not in self._missing]
        rounds: list[list[PairMeasure]] = []
        while pairs := next_pairs(names, rounds, self._threshold):
            self._tell(f"round {len(rounds) + 1}: {len(pairs)} pairs")
            rounds.append(self._round(pairs, reservation, follower))
            names = [name for name in names if name not in self._missing]
            rounds = [[m for m in one if not self._missing.keys() & set(m.pair)] for one in rounds]
        return names, rounds

    def _sweep(self, names: list[str], reservation: str, follower: StepFollower) -> None:
        self._tell(f"sweep over {len(names)} nodes")

        def heard(message: StepMessage) -> None:
            if isinstance(message, GroupSwept):
                self._sweeps.append(message.sweep)
                best = best_bus_bandwidth(message.sweep)
                self._tell(f"{message.sweep.collective}: {best:.3g} GB/s bus bandwidth at best")
            self._take_trouble(message)

        request = CollectiveRequest((self._group(names),), largest_bytes=self._largest())
        self._step(names, request, reservation, follower, heard)

    def _round(
        self, pairs: Sequence[NodePair], reservation: str, follower: StepFollower
    ) -> list[PairMeasure]:
        swept: dict[int, Sweep] = {}

        def heard(message: StepMessage) -> None:
            if isinstance(message, GroupSwept):
                swept[message.group] = message.sweep
            self._take_trouble(message)

        request = CollectiveRequest(
            tuple(self._group(pair) for pair in pairs),
            (Collective.ALL_REDUCE,),
            smallest_bytes=self._largest(),
            largest_bytes=self._largest(),
            passes=PASSES_OF_A_PAIR,
        )
        names = [name for pair in pairs for name in pair]
        self._step(names, request, reservation, follower, heard)
        measures = []
        for number, pair in enumerate(pairs):
            sweep = swept.get(number)
            rate = best_bus_bandwidth(sweep) if sweep else None
            measures.append(PairMeasure(pair, rate, wrong_elements(sweep) if sweep else 0))
            shown = "no result" if rate is None else f"{rate:.3g} GB/s"
            self._tell(f"{pair.first} and {pair.second}: {shown}")
        return measures

    def _step(
        self,
        names: Sequence[str],
        request: CollectiveRequest,
        reservation: str,
        follower: StepFollower,
        heard: Callable[[StepMessage], None],
    ) -> None:
        request = msgspec.structs.replace(
            request,
            hardware=self._hardware,
            budget_seconds=self._bounds.sweep_seconds,
            limit_seconds=self._bounds.rank_seconds,
        )
        order = StepOrder(
            reservation,
            tuple(names),
            as_program(PROGRAM, request),
            max(1, round(self._bounds.step_seconds / 60)),
            tasks_per_node=self._tasks_per_node,
            gres=self._gres,
        )
        for end in follower.follow([order], self._bounds.step_seconds, heard):
            if told := [line for line in end.said.splitlines() if _NO_MEASURE.search(line)]:
                raise _NotMeasured(f"its job was ended from outside, or could not begin: {told[0]}")
            if end.code != 0 and end.said:
                self._tell(f"srun ended with {end.code}: {end.said.splitlines()[-1]}")

    def _take_trouble(self, message: StepMessage) -> None:
        if isinstance(message, GroupTrouble):
            self._tell(f"{message.node}: {message.text}")
            self._troubles.append(message)
            if message.missing:
                self._missing[message.node] = message.text

    def _group(self, names: Sequence[str]) -> RankGroup:
        # The first rank is on the first node of the hostlist, which has an order of its own.
        hostlist = fold(names)
        first = expand(hostlist)[0]
        port = FIRST_PORT + secrets.randbelow(PORTS)
        return RankGroup(hostlist, self._nodes[first].address or first, port)

    def _largest(self) -> int:
        return self._options.largest_bytes or self._bounds.largest_bytes

    def _conclusion(self, names: list[str], rounds: list[list[PairMeasure]]) -> ClusterFindings:
        isolation = conclude(names, rounds, self._threshold)
        best: dict[str, float] = {}
        for measure in (m for one in rounds for m in one):
            for node in measure.pair:
                best[node] = max(best.get(node, 0.0), measure.bandwidth or 0.0)
        nodes = tuple(self._judged(name, isolation, best) for name in self._nodes)
        # Where a single node or none could measure, nothing is known of the whole.
        trouble = self._trouble_of_the_whole(isolation) if len(names) > 1 else ""
        return ClusterFindings(nodes, tuple(self._sweeps), isolation, best, trouble)

    def _judged(
        self, name: str, isolation: PairingConclusion, best: dict[str, float]
    ) -> NodeDeepCheck:
        rate, minimum = best.get(name, 0.0), isolation.minimum
        wanted = f"at least {minimum:.3g} GB/s is expected" if minimum is not None else ""
        result = DeepResult("links", DeepOutcome.PASSED, f"{rate:.3g} GB/s with another node")
        if name in self._missing:
            result = DeepResult("links", DeepOutcome.UNJUDGED, self._missing[name])
        elif name in isolation.slow:
            text = f"slow with several good nodes: {rate:.3g} GB/s at best, {wanted}"
            result = DeepResult("links", DeepOutcome.FAILED, text, Severity.REPLACE)
        elif name in isolation.unsettled:
            text = f"{rate:.3g} GB/s at best, and there is nothing good to compare it with"
            result = DeepResult("links", DeepOutcome.UNJUDGED, text)
        return _ended(name, result)

    def _trouble_of_the_whole(self, isolation: PairingConclusion) -> str:
        if isolation.slow:
            return ""
        wrong = sum(map(wrong_elements, self._sweeps))
        if wrong:
            return f"{wrong} elements of the sweep had a wrong value, and no pair of nodes shows it"
        if not self._sweeps and not isolation.unsettled:
            said = self._troubles[-1].text if self._troubles else "its step told nothing"
            return f"the sweep over all nodes came to no result, each pair did: {said}"
        reduced = [one for one in self._sweeps if one.collective is Collective.ALL_REDUCE]
        rate = best_bus_bandwidth(reduced[0]) if reduced else 0.0
        if self._threshold is not None and reduced and rate < self._threshold:
            return (
                f"the sweep reached {rate:.3g} GB/s, at least {self._threshold:g} is expected, and "
                "no node is slower than the others"
            )
        return ""


def _ended(name: str, result: DeepResult) -> NodeDeepCheck:
    begun = advanced(NodeDeepCheck(name), DeepState.IN_PROGRESS)
    ended = msgspec.structs.replace(begun, results=(result,))
    return advanced(ended, *end_of((result,)))
