"""Hold every use of what torch does not document.

Recovery inside the process needs some of what torch keeps to itself: gloo has no abort, a world
that failed must be forgotten without waiting for its members, changed parameters are told by their
version counters. Nothing else in this package names such a thing. Each function says for which
releases of torch it was seen to hold; `tests/training/test_compat.py` tries each of them, and names
the release when it does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

USES: dict[str, tuple[str, ...]] = {}
"""Function of this module → releases of torch that it was seen to hold for."""


def seen(*releases: str) -> Callable[[F], F]:
    """Note for which releases of torch a function was seen to hold."""

    def note(function: F) -> F:
        USES[function.__qualname__] = releases
        return function

    return note


def release() -> str:
    """Return the release of torch that runs: `2.13` for `2.13.0+cpu`."""
    return ".".join(str(torch.__version__).split(".")[:2])


# --- process groups -------------------------------------------------------------------------------


@seen("2.13")
def number_groups_anew() -> None:
    """Let the next group be the first one by name.

    torch numbers groups, and the number is part of every key in the store. A world that failed
    while it was formed counted in this process, and perhaps not in others.
    """
    dist.distributed_c10d._world.group_count = 0


@seen("2.13")
def known_groups() -> list[Any]:
    """Return every process group that torch knows of."""
    return list(dist.distributed_c10d._world.pg_map)


@seen("2.13")
def set_timeout(seconds: float, group: Any = None) -> None:
    """Set the time limit of a group's collectives after it was formed; None: the default group."""
    group = dist.group.WORLD if group is None else group
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@seen("2.13")
@contextlib.contextmanager
def forming_limit(seconds: float) -> Iterator[None]:
    """Let the groups that are made meanwhile without a time limit of their own have this one.

    `init_device_mesh` takes none, and torch's own is 30 minutes.
    """
    module: Any = dist.distributed_c10d
    usual = module.default_pg_timeout
    module.default_pg_timeout = timedelta(seconds=seconds)
    try:
        yield
    finally:
        module.default_pg_timeout = usual


@seen("2.11", "2.13")
def abort_nccl() -> None:
    """Abort NCCL's part of all groups; it may wait for kernels. torch goes on to know the groups:
    its own function for this forgets them, while their calls are still under way."""
    found = [
        group._get_backend(device)
        for group in known_groups()
        for device in group._device_types
        if device.type == "cuda"
    ]
    nccl = [backend for backend in found if backend.name() == "nccl"]
    if nccl:
        # As torch does it: aborts of several communicators, one after the other, can wait for each
        # other on different ranks.
        nccl[0]._group_start()
        for backend in nccl:
            backend.abort()
        nccl[0]._group_end()


@seen("2.13")
def collective_counter() -> Callable[[], int] | None:
    """Return a function that says how many collectives the default group has begun (0.2 µs)."""
    count: Callable[[], int] | None
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    try:
        return None if count is None or count() < 0 else count
    except RuntimeError:
        world = dist.group.WORLD
        return lambda: _begun(world)


@seen("2.13")
def collectives_begun(groups: Iterable[Any]) -> int:
    """Return how many collectives this process has begun in these groups."""
    return sum(map(_begun, groups))


def _begun(group: Any) -> int:
    try:
        count: int = group._get_sequence_number_for_group()
    except RuntimeError:
        # torch 2.11, `cpu:gloo,cuda:gloo`: such a group has no backend of its own that counts.
        backends = {id(one): one for one in map(group._get_backend, group._device_types)}
        count = sum(one._get_sequence_number_for_group() for one in backends.values())
    return count


@seen("2.13")
def wire_device(group: Any) -> torch.device:
    """Return where a group sends from: the current GPU if it uses NCCL, else host memory."""
    if torch.cuda.is_available():
        for device in group._device_types:
            if device.type == "cuda" and group._get_backend(device).name() == "nccl":
                return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@seen("2.13")
def gloo_timeout(group: Any) -> timedelta:
    """Return the present time limit of a gloo group's collectives.

    A message has the limit that the group was formed with, unless it is waited for with another.
    """
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


# --- wrappers -------------------------------------------------------------------------------------


@seen("2.13")
def disarm(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Remove a DDP wrapper's hooks: they would fire in the next world's backward, and reduce in a
    dead group."""
    wrapper.reducer._remove_autograd_hooks()


@seen("2.13")
def let_reducer_go(wrapper: Any) -> None:
    """Run the destructor of a DDP wrapper's C++ half now, in this thread."""
    if hasattr(wrapper, "reducer"):
        wrapper.reducer = wrapper.logger = None


@seen("2.13")
def reduction_check(wrapper: nn.parallel.DistributedDataParallel) -> Callable[[], None]:
    """Return what raises RuntimeError while a DDP wrapper waits for gradients of the last backward,
    so that what the parameters have was not exchanged, or not all of it."""
    check: Callable[[], None] = wrapper.reducer._check_reducer_finalized
    return check


@seen("2.13")
def sends_buffers(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Tell whether each forward of a DDP wrapper takes the buffers of rank 0: not where the module
    had none when it was wrapped, and was given some later."""
    return bool(wrapper.broadcast_buffers and wrapper.modules_buffers)


@seen("2.13")
def hook_states(wrapper: Any) -> list[Any]:
    """Return the states that a DDP wrapper's hooks for gradients were registered with."""
    return [state for _, state in wrapper._comm_hooks]


@seen("2.13")
def watch_frozen(parameter: torch.Tensor, came: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when a frozen parameter gets a gradient after all, because it was
    unfrozen. Returns what ends this."""
    # torch takes such a hook only while it could be of use.
    parameter.requires_grad_(True)
    try:
        register: Any = parameter.register_post_accumulate_grad_hook
        handle = register(lambda _: came())
    finally:
        parameter.requires_grad_(False)
    remove: Callable[[], None] = handle.remove
    return remove


@seen("2.13")
def noted_hooks(wrapper: nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return the list in which a DDP wrapper notes its communication hooks. A hook that torch
    refuses is noted nevertheless, and must be taken out."""
    hooks: list[Any] = wrapper._comm_hooks
    return hooks


@seen("2.13")
def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside of one that `torch.compile` gave; any other as it is."""
    inside: nn.Module | None = module._modules.get("_orig_mod")
    return module if inside is None else inside


@seen("2.13")
def watch_device_meshes(made: Callable[[Any], None]) -> None:
    """Have a function called with each device mesh that this process makes from now on. A slice of
    another one, which has that one's groups, is not told."""
    meshes: Any = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
    make = meshes.__init__

    @functools.wraps(make)
    def make_and_tell(mesh: Any, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        if getattr(mesh, "_root_mesh", None) is None or hasattr(mesh, "_dim_group_names"):
            made(mesh)

    meshes.__init__ = make_and_tell


@seen("2.13")
def watch_training_parts(made: Callable[[Any], None]) -> None:
    """Have a function called with each optimizer, schedule, gradient scaler and averaged model that
    this process makes from now on; with some of them more than once."""
    schedules = torch.optim.lr_scheduler
    kinds: list[Any] = [torch.optim.Optimizer, schedules.LRScheduler, torch.amp.GradScaler]
    kinds += [torch.optim.swa_utils.AveragedModel]
    # They leave out the __init__ of their base.
    kinds += [schedules.SequentialLR, schedules.ChainedScheduler, schedules.ReduceLROnPlateau]
    for kind in kinds:
        _tell_of_made(kind, made)


def _tell_of_made(kind: Any, made: Callable[[Any], None]) -> None:
    make = kind.__init__

    @functools.wraps(make)
    def make_and_tell(thing: Any, *args: Any, **kwargs: Any) -> None:
        make(thing, *args, **kwargs)
        made(thing)

    kind.__init__ = make_and_tell


@seen("2.13")
def watch_copied_modules(copied: Callable[[nn.Module], None]) -> None:
    """Have a function called with each module that `copy.deepcopy` gives from now on, and with each
    part of it, when it is ready. (And with what `copy.copy` and pickle give.)"""
    restore: Callable[..., None] = nn.Module.__setstate__

    @functools.wraps(restore)
    def restore_and_tell(module: nn.Module, state: dict[str, Any]) -> None:
        restore(module, state)
        copied(module)

    nn.Module.__setstate__ = restore_and_tell  # type: ignore[method-assign]


@seen("2.13")
def tells_of_steps(optimizer: Any) -> bool:
    """Tell whether torch tells of an optimizer's steps: not of one that leaves out torch's own
    `__init__`."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


class MeshPlace(NamedTuple):
    """A device mesh, and this process in it."""

    key: tuple[Any, ...]
    """Its ranks and shape. To torch, two meshes with the same are one."""
    groups: tuple[str, ...]
    """Their names."""
    coordinate: tuple[int, ...] | None
    rank: int


@seen("2.13")
def mesh_place(mesh: Any) -> MeshPlace | None:
    """Return what torch's layouts take from a device mesh; None: this cannot be told."""
    names = getattr(mesh, "_dim_group_names", None)
    if names is None or not hasattr(mesh, "_hash_key"):
        return None
    return MeshPlace(mesh._hash_key(), tuple(names), mesh.get_coordinate(), mesh.get_rank())


@seen("2.13")
def take_groups(old: Any, new: Any) -> None:
    """Have an old device mesh go on with the groups of a new one in the same place."""
    old._pg_registry = new._pg_registry


@seen("2.13")
def forget_layouts() -> None:
    """Have torch work out anew what operations on DTensors give, and on the way from one
    layout to another.

    It keeps that by the layouts of what goes in. Device meshes of two worlds that list the same
    ranks count as equal, so in the new world it would give tensors of the old one's mesh, in which
    this process may have held another part.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    redistribute: Any = importlib.import_module("torch.distributed.tensor._redistribute")
    if hasattr(redistribute._gen_transform_infos, "cache_clear"):
        redistribute._gen_transform_infos.cache_clear()
    debug: Any = importlib.import_module("torch.distributed.tensor.debug")
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
        return
    # Earlier releases keep it in Python only.
    tensor: Any = importlib.import_module("torch.distributed.tensor")
    tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


# --- tensors --------------------------------------------------------------------------------------


@seen("2.13")
def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written to in place, as autograd counts it."""
    return list(map(VERSION, tensors))


VERSION = operator.attrgetter("_version")
"""Reads of one tensor what `versions` returns."""


@seen("2.13")
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many small tensors in one call."""
    torch._foreach_copy_(targets, sources)


@seen("2.13")
def buffer_places(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Return the table and the name of every buffer: a forward may put another tensor there."""
    return [
        (part._buffers, key)
        for module in modules
        for part in module.modules()
        for key in part._buffers
    ]


@seen("2.13")
def buffer_names(modules: Mapping[str, nn.Module]) -> dict[tuple[int, str], str]:
    """Return the name of every buffer, by the id of its table and its key there.

    Args:
        modules: name → module.
    """
    return {
        (id(part._buffers), key): ".".join(filter(None, (name, path, key)))
        for name, module in modules.items()
        for path, part in module.named_modules()
        for key in part._buffers
    }


@seen("2.13")
def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's numbers lie in memory of its own, one beside the other: not those of
    a sparse one, of one that a compiler only thinks of, or of one that was seen inside of a
    function that `torch.func` differentiates."""
    if tensor.layout != torch.strided or isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@seen("2.13")
def keeps_running_averages(part: nn.Module) -> bool:
    """Tell whether a module keeps averages of what it has seen, of which each rank may have its
    own: a norm, an observer of ranges."""
    is_observer = type(part).__module__.startswith("torch.ao.")
    return isinstance(part, nn.modules.batchnorm._NormBase) or is_observer


@seen("2.13")
def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that are not in the module's state_dict."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }


@seen("2.13")
def put_buffer(
    module: nn.Module, name: str, tensor: torch.Tensor | None, *, persistent: bool
) -> None:
    """Put a tensor in the place of a buffer, or make the buffer, if nothing else has its name."""
    if name in module._buffers:
        module._buffers[name] = tensor
    elif not hasattr(module, name):
        module.register_buffer(name, tensor, persistent=persistent)


@seen("2.13")
def to_shards(part: Any) -> None:
    """Give the parameters of an FSDP2 module their shards back, whatever it was doing.

    Its own `reshard` keeps them whole in the midst of a forward where they stay so until backward:
    in the root, or with ``reshard_after_forward=False``.
    """
    part.reshard()
    state = part._get_fsdp_state()
    # Releases before 2.13 have one group in a module.
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            group._to_sharded()


@seen("2.13")
def hooks_on(module: nn.Module) -> int:
    """Return how many hooks of the program's a module, its parts and their parameters have."""
    parts = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(
        not str(getattr(hook, "__module__", "")).startswith(f"{__package__}.")
        for things, names in ((module.modules(), parts), (module.parameters(), tensors))
        for one in things
        for name in names
        for hook in (getattr(one, name) or {}).values()
    )


@seen("2.13")
def holder_of(parameters: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module that holds these very tensors as its parameters, also those that are no
    `nn.Parameter`."""
    module = nn.Module()
    module._parameters.update(parameters)  # type: ignore[arg-type]
    return module


@seen("2.13")
def batches_of_iterators(objects: Iterable[Any]) -> list[tuple[Any, int]]:
    """Return the iterators of DataLoaders among some objects, each with the number of batches that
    it has given."""
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    # By type: a lazy object may do anything when it is asked for its class.
    return [(one, one._num_yielded) for one in objects if issubclass(type(one), kind)]


@seen("2.13")
def is_gradient_scaler(thing: Any) -> bool:
    """Tell whether this is a gradient scaler, torch's or one that is made like it."""
    return hasattr(thing, "_per_optimizer_states")


@seen("2.13")
def is_scaler_used(scaler: Any) -> bool:
    """Tell whether a gradient scaler has scaled a loss."""
    return scaler._scale is not None


@seen("2.13")
def forget_unscaled(scaler: Any) -> None:
    """Let a gradient scaler forget that it unscaled gradients: a repeated step does it again."""
    scaler._per_optimizer_states.clear()


@seen("2.13")
def load_compiler() -> None:
    """Import what `torch.optim` would import at its first use, which takes long."""
    importlib.import_module("torch._dynamo")


# --- data ---------------------------------------------------------------------------------------


@seen("2.13")
def forget_workers(loader: Any) -> None:
    """Let a torch DataLoader with `persistent_workers` start new ones when it is iterated next. It
    would ask those that have died again and again.

    Args:
        loader: a DataLoader.
    """
    loader._iterator = None
