"""Find a checkpoint that is good, and load it; the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from slurm_resilience.errors import CheckpointError
from slurm_resilience.training.checkpoint import manifest as manifests
from slurm_resilience.training.checkpoint import state_tree
from slurm_resilience.training.checkpoint.agreement import PartFailed, SaveAgreement, one_line
from slurm_resilience.training.checkpoint.catalog import CheckpointCatalog
from slurm_resilience.training.checkpoint.manifest import Damaged

log = logging.getLogger(__name__)


def latest(catalog: CheckpointCatalog, group: dist.ProcessGroup | None, content: bool) -> int:
    """Return the newest good step; -1: none. See `Checkpointer.latest`."""
    team = SaveAgreement(group)
    try:
        order = catalog.certificates.in_order
        steps = team.together(lambda: order(catalog.steps()) if team.leads else [])[0]
    except PartFailed as failed:
        raise CheckpointError(str(failed)) from None
    for step in steps:
        try:
            check(catalog, step, team, content)
        except PartFailed as failed:
            if team.leads:
                catalog.complain(f"checkpoint of step {step} is skipped: {failed}")
        else:
            return int(step)
    return -1


def check(catalog: CheckpointCatalog, step: int, team: SaveAgreement, content: bool) -> None:
    """Compare a checkpoint with its manifest; the ranks share the reading.

    Raises:
        PartFailed: it is damaged; the text names the file.
    """

    def looks() -> bool:
        _, seen = catalog.manifest(step)
        return not content or catalog.verified(step, seen)

    def reads() -> None:
        manifest, _ = catalog.manifest(step)
        own = sorted(manifest.files)[team.rank :: team.world]
        manifests.verify(catalog.at(step), manifest, own)

    if all(team.together(looks)):
        return
    _, seen = catalog.manifest(step)
    try:
        team.together(reads)
    except PartFailed as failed:
        catalog.remember(step, seen, str(failed))
        raise
    catalog.remember(step, seen)


def load(
    catalog: CheckpointCatalog,
    step: int,
    state: dict[str, Any],
    group: dist.ProcessGroup | None,
    content: bool,
    per_rank: Collection[str],
) -> None:
    """Load a checkpoint in place. See `Checkpointer.load`.

    Raises:
        CheckpointError: it is unusable.
        RuntimeError: the group broke; that says nothing of the checkpoint.
    """
    team = SaveAgreement(group)
    try:
        check(catalog, step, team, content)
        _load(catalog, step, state, team, per_rank)
    except (PartFailed, CheckpointException, Damaged) as error:
        raise CheckpointError(
            f"checkpoint of step {step} in {catalog.path} cannot be loaded: {one_line(error)}"
        ) from error


def _load(
    catalog: CheckpointCatalog,
    step: int,
    state: dict[str, Any],
    team: SaveAgreement,
    per_rank: Collection[str],
) -> None:
    reader = FileSystemReader(catalog.at(step))
    known: dict[str, Any] = {}
    team.together(lambda: known.update(reader.read_metadata().state_dict_metadata))
    each = {name for name, value in state.items() if state_tree.is_own(name, value, per_rank)}
    paths = {name: state_tree.own_name(name, team.rank) if name in each else name for name in state}
    for name, path in list(paths.items()):
        if state_tree.TREE + path in known:
            continue
        if name not in each:
            raise PartFailed(f"it has no {name!r}")
        first = state_tree.own_name(name, 0)
        if state_tree.has_successors(state[name]) and state_tree.TREE + first in known:
            paths[name] = first
            continue
        log.warning("checkpoint of step %d has no %s for rank %d", step, name, team.rank)
        del paths[name]
    trees = {state_tree.TREE + path: b"" for path in paths.values()}
    _read(reader, trees, team)

    def templates() -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for name, path in paths.items():
            tree = trees[state_tree.TREE + path]
            own = state_tree.template(name, path, state[name], state, tree)
            for key in state_tree.keys_of(tree):
                tensors[key] = _fitting(own.get(key), known[key], state_tree.has_shape(state[name]))
        return tensors

    flat: dict[str, Any] = {}
    team.together(lambda: flat.update(templates()))
    _read(reader, flat, team)

    def apply() -> None:
        # Modules before what refers to their parameters.
        order = sorted(paths, key=lambda name: not isinstance(state[name], torch.nn.Module))
        for name in order:
            saved = state_tree.join(trees[state_tree.TREE + paths[name]], flat.__getitem__)
            state[name] = state_tree.put_back(name, state[name], state, saved)

    team.together(apply)


def _fitting(live: torch.Tensor | None, saved: TensorStorageMetadata, fixed: bool) -> torch.Tensor:
    """Return a saved tensor's target: the live one, or a new one where that has another shape."""
    if live is not None and (fixed or live.shape == saved.size):
        return live
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def _read(reader: FileSystemReader, into: dict[str, Any], team: SaveAgreement) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_load(
        into,
        storage_reader=reader,
        planner=planner,
        process_group=team.group,
        no_dist=team.group is None,
    )
