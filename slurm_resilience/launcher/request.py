"""From the launcher's command line and its environment to the job of this node."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import exit_codes, flags, launch, rendezvous_directory
from slurm_resilience.launcher.group_restart import RestartSpec, free_port
from slurm_resilience.launcher.launch_spec import GracePeriods, LaunchSpec
from slurm_resilience.launcher.node_rank import find_node_rank
from slurm_resilience.launcher.processes.child_environment import (
    NodeSeats,
    nodes_told,
    without_outer_rank,
)
from slurm_resilience.launcher.processes.output import Streams
from slurm_resilience.launcher.processes.reaper import Reaper
from slurm_resilience.launcher.processes.warm_interpreter import (
    WarmSpec,
    program_file,
    program_front,
)
from slurm_resilience.launcher.program_traits import ProgramTraits, check_size, read_traits
from slurm_resilience.launcher.recipe_file import Recipe, read
from slurm_resilience.launcher.rendezvous_directory import RendezvousDirectory
from slurm_resilience.launcher.restart_policy import RestartRules
from slurm_resilience.launcher.warm_policy import WarmPlan, plan_warm
from slurm_resilience.mesh.own_address import own_address
from slurm_resilience.mesh.rank_variables import LENT
from slurm_resilience.mesh.rendezvous import HOLD, LAUNCHERS, RESTARTS, note_passed

_TORCH = (
    "torch",
    "torch._dynamo",  # by the first optimizer, with sympy: more than half a second
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
)
"""The modules of torch that a training process has imported by the end of its first step."""

_WARM = (
    *_TORCH,
    "slurm_resilience.training.checkpoint",
    "slurm_resilience.training.data",
    "slurm_resilience.training.block",
)
"""The same with the library's own."""

_FILES, _FILES_A_RANK, _FILES_A_TEED_RANK = 10, 2, 4
"""Open files of a launcher: for itself and the start of a process, and for each rank."""

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128")


def start(given: Mapping[str, Any], environment: dict[str, str]) -> int:
    """Make the job of this node, and live its life.

    Args:
        given: the command line's flags, by their names in `main`.
        environment: the launcher's own.

    Returns:
        The launcher's exit code.

    Raises:
        SresError: the flags and the environment make no job.
    """
    environment = without_outer_rank(environment)
    kind, argv = _program(given)
    before = _script("pre-train", given["pre_train_script"], given["pre_train_args"])
    after = _script("post-train", given["post_train_script"], given["post_train_args"])
    wishes = _wishes(given)
    here = find_node_rank(
        environment, wishes.nodes, given["node_rank"], given["rdzv_id"], given["standalone"]
    )
    if wishes.least:
        least = min(wishes.least, here.nodes.most)
        here = msgspec.structs.replace(here, nodes=flags.SeatSpan(least, here.nodes.most))
    ranks = _ranks(wishes.ranks, environment)
    redirects = flags.streams("--redirects", given["redirects"], ranks)
    tees = flags.streams("--tee", given["tee"], ranks)
    shown = flags.ranks_filter(given["local_ranks_filter"], ranks)
    _check_files(_FILES + (_FILES_A_TEED_RANK if any(tees) else _FILES_A_RANK) * ranks)
    private = rendezvous_directory.private_directory()
    guard = Reaper(private)
    try:
        rendezvous = rendezvous_directory.choose(
            environment,
            here,
            ranks,
            private,
            given["rdzv_backend"],
            given["rdzv_endpoint"],
            given["secret_file"],
        )
        for note in filter(None, (here.note, rendezvous.note)):
            launch.say(f"note: {note}")
        node = NodeSeats(
            here=here,
            ranks=ranks,
            meet=rendezvous.meet,
            name=environment.get("SRES_NODE")
            or environment.get("SLURMD_NODENAME")
            or os.uname().nodename,
            secret=rendezvous.secret,
            keeper=str(private / "keeper"),
            role=given["role"],
            replacements=given["max_restarts"],
            master=_master(given, environment, rendezvous.first, here.alone),
            virtual=given["virtual_local_rank"],
            nodes_told=nodes_told(environment, ranks),
        )
        limit = given["shutdown_timeout"]
        held = environment.get(HOLD)
        warm = _warm(given, kind, argv, Path(held) if held else None)
        check_size(warm.traits, environment, argv[0])
        job = LaunchSpec(
            node=node,
            rendezvous=rendezvous,
            kind=kind,
            argv=argv,
            rules=RestartRules(given["max_restarts"], given["restart_window"]),
            streams=tuple(
                Streams(redirects[local], tees[local], local in shown) for local in range(ranks)
            ),
            log_dir=_log_dir(given["log_dir"], here.run, any(redirects) or any(tees)),
            standbys=_standbys(given, kind, wishes.standby, warm),
            standby_modules=(*_WARM, *given["standby_import"]),
            warm=warm,
            restart=_restart(given, environment, node, rendezvous, warm.traits),
            grace=GracePeriods(
                15.0 if limit is None else limit, 60.0 if limit is None else limit, limit
            ),
            incarnation=flags.number(environment, "SRES_INCARNATION"),
            before=before,
            after=after,
        )
        code = launch.life(job, environment, guard)
        lent = environment.get(LENT) == "1"
        # Ranks that left a lent node have not passed the training: those of the next one join it.
        if code == exit_codes.DONE and (not lent or rendezvous_directory.is_complete(node.meet)):
            note_passed(rendezvous.passed)
        return code
    finally:
        rendezvous_directory.remove(private)
        guard.close()


def _check_files(number: int) -> None:
    """Refuse a limit of open files with which not all ranks could be started.

    Raises:
        UsageError: so many cannot be opened.
    """
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(number):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise UsageError(
                f"{error.strerror}: the limit is {limit} (ulimit -n), and the launcher opens "
                f"{number} more for its ranks: raise it, to 1024 for example"
            ) from None


def _restart(
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    node: NodeSeats,
    rendezvous: RendezvousDirectory,
    traits: ProgramTraits,
) -> RestartSpec:
    """Return the ranks that are started again together, and where the nodes meet for that."""
    alone, scope = node.here.alone, given["restart"]
    plain = traits.uses_torch and not traits.uses_library
    together = scope == "all" or (scope == "auto" and plain)
    # With a span of nodes a program goes on with fewer, so it recovers by itself.
    several = not alone and node.here.nodes.least == node.here.nodes.most
    meets = rendezvous.directory is not None and several and together
    if together and several and not meets:
        launch.say("note: each node starts its ranks again by itself: there is no shared directory")
    meet = None
    if meets and rendezvous.directory:
        # The supervisor watches the launchers of plain programs, and brings a lost one back.
        meet = rendezvous.directory / (LAUNCHERS if plain else RESTARTS)
    master = {} if node.master is None else {"MASTER_ADDR": node.master[0]}
    return RestartSpec(
        scope,
        0 if node.master is None else node.master[1],
        own_port=alone and not given["master_port"] and not environment.get("MASTER_PORT"),
        # The supervisor watches the launchers of a plain program, and brings a lost one back.
        meet=meet,
        host=own_address({**environment, **master}, on_one_machine=meet is None),
        comes_back="SRES_TOKEN" not in environment,
    )


def _warm(
    given: Mapping[str, Any], kind: str, argv: tuple[str, ...], held: Path | None
) -> WarmSpec:
    """Return the warm interpreter that this node is to have.

    Raises:
        UsageError: it is asked for with a program that no interpreter can start.
    """
    if kind == "program":
        if given["warm"]:
            raise UsageError("--warm is for Python's programs; leave it out, or --no-python")
        return WarmSpec(WarmPlan(False), hold=held)
    file = program_file(kind, argv[0])
    try:
        traits = None if file is None else read_traits(file.read_bytes())
    except OSError:
        traits = None
    plan = plan_warm(
        given["warm"],
        given["standby"] is not None or given["recipe"] is not None,
        traits,
        any(Path(device).exists() for device in _GPU_DEVICES),
    )
    known = traits or ProgramTraits()
    ours = known.uses_library or given["recipe"] is not None
    modules = (*(_WARM if ours else _TORCH), *given["standby_import"])
    return WarmSpec(plan, modules, known, program_front(kind, argv[0]), held)


def _standbys(given: Mapping[str, Any], kind: str, wished: int, warm: WarmSpec) -> int:
    """Count the standbys: a warm interpreter takes their place unless they are asked for."""
    replaced = warm.plan.wanted and given["standby"] is None
    return 0 if kind == "program" or replaced else wished


class _Wishes(NamedTuple):
    """The wishes of the flags, or else of the recipe, about the node."""

    nodes: str | None
    least: int
    """Nodes without which training waits; 0: as `nodes` says."""
    ranks: str
    standby: int


def _wishes(given: Mapping[str, Any]) -> _Wishes:
    recipe = Recipe() if given["recipe"] is None else read(given["recipe"])
    wanted = recipe.nodes
    nodes, least = given["nnodes"], 0
    if nodes is None and given["recipe"] is not None and not given["standalone"]:
        least = wanted.min_nodes
        nodes = f"{least}:{wanted.max_nodes}" if wanted.max_nodes else None
    standby = given["standby"]
    return _Wishes(
        nodes,
        least,
        given["nproc"] or str(wanted.ranks_per_node),
        wanted.standby if standby is None else standby,
    )


def _program(given: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return what the ranks run.

    Raises:
        UsageError: nothing, too much, or what does not exist.
    """
    script, recipe = given["script"], given["recipe"]
    if recipe is not None:
        if script or given["module"] or given["no_python"]:
            raise UsageError("--recipe trains by itself: leave the script out")
        if not Path(recipe).is_file():
            raise UsageError(f"--recipe={recipe}: no such file")
        return "module", ("slurm_resilience.training.recipes.train", recipe)
    if not script:
        raise UsageError("no script: write … [flags] train.py [arguments], or --recipe FILE.toml")
    if given["module"] and given["no_python"]:
        raise UsageError("--module and --no-python exclude each other")
    argv = (script, *given["args"])
    if given["module"]:
        return "module", argv
    if given["no_python"]:
        if shutil.which(script) is None:
            raise UsageError(f"{script}: no such program")
        return "program", argv
    if not Path(script).exists():
        raise UsageError(f"{script}: no such file (flags of the launcher come before the script)")
    return "script", argv


def _script(name: str, path: str | None, arguments: str) -> tuple[str, ...]:
    """Return a pre-train or post-train script with its arguments; empty: there is none.

    Raises:
        UsageError: it cannot be run, or the arguments cannot be split.
    """
    if path is None:
        if arguments:
            raise UsageError(f"--{name}-args without --{name}-script")
        return ()
    try:
        split = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"--{name}-args={arguments}: {error}") from None
    file = Path(path).absolute()
    if not file.is_file():
        raise UsageError(f"--{name}-script={path}: no such file")
    if os.access(file, os.X_OK):
        return (str(file), *split)
    if file.suffix == ".py":
        return (sys.executable, str(file), *split)
    raise UsageError(f"--{name}-script={path} is not executable: chmod +x {path}")


def _ranks(text: str, environment: dict[str, str]) -> int:
    gpus = flags.gpus_offered(environment) if text in ("gpu", "auto") else 0
    if gpus < 0:
        gpus = _nvml()
    return flags.local_world(text, gpus, len(os.sched_getaffinity(0)))


def _nvml() -> int:
    """GPUs that the driver knows; 0 without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no library, no driver, no permission: no GPU that could be counted on
        return 0


def _master(
    given: Mapping[str, Any], environment: dict[str, str], first: str, alone: bool
) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT: given ones; on one node any; else node 0, if it is known."""
    address = given["master_addr"] or environment.get("MASTER_ADDR") or first
    port = given["master_port"] or flags.number(environment, "MASTER_PORT")
    if not address:
        return None
    return address, port or (free_port() if alone else 29500)


def _log_dir(given: str | None, run: str, used: bool) -> Path | None:
    if not used:
        return None
    try:
        if given is not None:
            Path(given).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{run.replace('/', '_')}_", dir=given))
    except OSError as error:
        raise UsageError(f"--log-dir={given}: {error.strerror}") from None
