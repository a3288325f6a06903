"""Programs that break a rule, as a user would write them: each is refused, or warned of within two
steps, without waiting for a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest
from naive import PROGRAM, USUAL, WEIGHTS, Program, refused, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")


def test_a_training_that_lacks_ranks_ends_when_its_patience_does(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(parts="", options="shortage_patience=0.5", body="    pass"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    more = {"RANK": "0", "WORLD_SIZE": "2", "SRES_MEET": f"dir:{tmp_path}/meet"}
    more["SRES_ADDRESS"] = "127.0.0.1"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=clean | more,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    words = "for 0.5 s 1 of 2 ranks were there, and at least 2 are needed (min_world)"
    refused(done, words)


def test_a_program_that_keeps_the_rules_is_told_nothing(run: Program) -> None:
    done = run(USUAL + "\nsay(sorted(s.compared.items()))\n")
    told_nothing(done)
    assert done.stdout.count("('equal', True)") == 2, done.stdout


def test_a_process_group_of_ones_own_is_refused(run: Program) -> None:
    """Torchrun's programs begin so. A replaced process waited in it for the others for 30 minutes,
    when the training was over."""
    here = """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    file = os.path.join(os.environ["TMPDIR"], "store")
    dist.init_process_group(
        "gloo", f"file://{file}", rank=int(os.environ["RANK"]), world_size=2
    )
    """
    refused(run(USUAL, parts=here), "leave out init_process_group")


def test_a_swallowed_error_of_a_collective_is_not_committed(run: Program) -> None:
    """Seat 1 dies before its gradients are exchanged; seat 0 logs the error and goes on."""
    body = """
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=6, epochs=None):
        swallowed = False
        try:
            nn.functional.mse_loss(net(x), y).backward()
        except RuntimeError:
            swallowed = True
            say("swallowed")
        with s.update():
            if swallowed:
                say("committed")
            opt.step()
            opt.zero_grad()
    """
    done = run(body, inject="kill:rank=1,step=3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "swallowed" in done.stdout
    assert "committed" not in done.stdout, done.stderr[-4000:]
    assert "step 3 is not committed" in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 6") == 2, done.stdout


def test_an_error_that_is_caught_around_the_loop_ends_no_training(run: Program) -> None:
    """The function returned in the step that the other rank's death broke off. Where both ranks did
    so, the training was over there, with exit code 0."""
    head, loop = USUAL.replace("steps=4", "steps=8").split("for x, y", 1)
    body = head + "try:\n" + indent("for x, y" + loop, " " * 4)
    body += "except Exception as error:\n    say('caught', error)\n"
    done = run(body, inject="kill:rank=1,step=3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("caught") == 1, done.stdout
    assert done.stdout.count("ends at 8") == 2, done.stdout
    assert "step 3 is not committed" in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("where", ["before its collectives", "after its collectives"])
def test_a_step_that_one_rank_alone_leaves_out_is_healed(
    run: Program, where: str, step: int
) -> None:
    """An error that its loop catches: its replica was another one from then on, or its gradients
    were added to those of the batch before; and the ranks waited for each other at the end."""
    forward = "nn.functional.mse_loss(net(x), y).backward()"
    error = f"if s.rank and s.step == {step} and failed == []: failed.append(1); raise MemoryError"
    lines = [error, forward] if where.startswith("before") else [forward, error]
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    failed = s.once(list)
    for x, y in s.loader(DATA, global_batch=8, steps=150, epochs=None):
        try:
            {lines[0]}
            {lines[1]}
        except MemoryError:
            opt.zero_grad()
            continue
        with s.update():
            opt.step()
            opt.zero_grad()
        time.sleep(0.01)
    """
    done = run(dedent(body) + WEIGHTS, "import time")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fault 1 in step" in done.stderr
    assert "seat 1 left out an update that seat 0 made" in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 150") == 2, done.stdout
    assert len({line for line in done.stdout.splitlines() if line.startswith("weights")}) == 1


def test_a_step_that_is_left_out_near_the_end_is_healed(run: Program) -> None:
    """The rank had no batch left and returned before that was seen; the other one waited for it
    for a minute, three times, and the training gave up."""
    body = """
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=8, epochs=None):
        try:
            nn.functional.mse_loss(net(x), y).backward()
        except RuntimeError:
            continue
        with s.update():
            opt.step()
            opt.zero_grad()
    """
    done = run(dedent(body) + WEIGHTS, inject="exception:rank=1,step=6,phase=backward")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "seat 1 left out an update that seat 0 made" in done.stderr, done.stderr[-4000:]
    assert "stands still" not in done.stderr, done.stderr[-4000:]
    ends = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert done.stdout.count("ends at 8") == 2 and ends[-1] == ends[-2], done.stdout


@pytest.mark.parametrize("step", [0, 3])
def test_a_collective_that_one_rank_calls_alone_in_the_first_steps_is_told(
    run: Program, step: int
) -> None:
    """The others' next one was taken for it, and all waited for ten minutes."""
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=8, epochs=None):
        nn.functional.mse_loss(net(x), y).backward()
        if s.rank and s.step == {step} and s.generation == 1:
            dist.barrier()
        with s.update():
            opt.step()
            opt.zero_grad()
    """
    parts = "from slurm_resilience.training import Watch"
    done = run(body, parts, options="watch=Watch(floor=1.0)")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout
    words = (
        f"seat 1 waits in a collective that seat 0 has not made in as many batches (step {step})"
    )
    assert words in done.stderr, done.stderr[-4000:]


def test_a_rank_that_returned_and_is_called_again_says_why(run: Program) -> None:
    """It told the reason of the world before, that another rank had died."""
    leaves = "    if s.rank == 0 and s.step == 5 and not left: left.append(1); break\n"
    body = "left = s.once(list)\n" + USUAL.replace("steps=4", "steps=8").lstrip() + leaves
    parts = "from slurm_resilience.training import Watch"
    options = "watch=Watch(floor=8.0, first=8.0)"
    done = run(body, parts, options, inject="exception:rank=1,step=3,phase=backward")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout
    lines = [
        line for line in done.stderr.splitlines() if "seat 0 had returned, and is need" in line
    ]
    assert len(lines) == 1 and ": 2 of 2 ranks; " in lines[0], done.stderr[-4000:]


def test_weights_that_are_loaded_after_track_are_told(run: Program) -> None:
    load = "model.load_state_dict({n: torch.zeros_like(v) for n, v in model.state_dict().items()})"
    body = USUAL.replace("net = s.ddp(model)", f"net = s.ddp(model)\n{load}")
    warned(run(body), "model.weight, model.bias changed between s.track and the first")


@pytest.mark.parametrize("other", [False, True])
def test_an_optimizer_that_is_given_another_state_is_told(run: Program, other: bool) -> None:
    """accelerate, and with it transformers' Trainer, gives each optimizer its own state anew."""
    load = "opt.load_state_dict(opt.state_dict())"
    if other:
        load = load.replace("opt.state", "__import__('copy').deepcopy(opt).state")
    body = USUAL.replace("net = s.ddp(model)", f"net = s.ddp(model)\n{load}")
    done = run(body, inject="exception:rank=1,step=2,phase=backward")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("opt changed between s.track and the first") == int(other)


def test_weights_that_the_function_loads_after_a_fault_are_told(run: Program) -> None:
    """A checkpoint of its own that was not there at first: the state of all ranks is lost."""
    loads = """
    if os.path.exists(f"{__file__}.pt"):
        model.load_state_dict(torch.load(f"{__file__}.pt"))
    """
    saves = """
    if s.rank == 0 and s.step == 2:
        torch.save(model.state_dict(), f"{__file__}.new")
        os.replace(f"{__file__}.new", f"{__file__}.pt")
    """
    body = USUAL.replace("s.track(", f"{dedent(loads)}s.track(").replace("steps=4", "steps=6")
    done = run(
        body + indent(dedent(saves), "    "), inject="exception:rank=1,step=4,phase=backward"
    )
    refused(done, "before s.track (weights that it loads whenever it is called? Load them in what")


def test_frozen_weights_that_differ_are_refused(run: Program) -> None:
    parts = """
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))  # not seeded
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model[1].parameters(), 0.01)
    """
    done = run(USUAL, parts, options="trainable_only=True")
    refused(done, "frozen parameters differ: rank 1 from rank 0 in model.0.weight, model.0.bias")


FROZEN_BASE = """
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model[1].parameters(), 0.01)
"""
MERGED = """\
        if (s.step + 1) % {} == 0:
            with torch.no_grad():
                model[0].weight.add_(0.01)
"""


@pytest.mark.parametrize("every", [1, 12])
def test_frozen_weights_that_change_are_told(run: Program, every: int) -> None:
    """Adapters that are merged now and then: the training ended at the first fault, by name."""
    body = USUAL.replace("steps=4", "steps=40").replace(
        "        opt.z", MERGED.format(every) + "        opt.z"
    )
    done = run(body, FROZEN_BASE, options="trainable_only=True")
    warned(done, "model.0.weight: frozen, and changed")


def test_frozen_weights_that_stay_are_told_nothing(run: Program) -> None:
    told_nothing(
        run(USUAL.replace("steps=4", "steps=40"), FROZEN_BASE, options="trainable_only=True")
    )


@pytest.mark.parametrize("called", [False, True])
def test_a_lazy_module_that_has_no_weights_yet_is_refused(run: Program, called: bool) -> None:
    """Its weights failed to be sent, three times, with a traceback from inside of torch."""
    parts = f"""
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
        {"model(X)" if called else ""}
        return model, torch.optim.SGD(model.parameters(), 0.01)
    """
    if called:
        told_nothing(run(USUAL, parts))
    else:
        refused(run(USUAL, parts), "model.0.weight, model.0.bias: a lazy module has no weights")


FREEZING = """
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize("sign", ["==", ">="])
def test_a_newcomer_trains_the_parameters_that_its_peer_trains(run: Program, sign: str) -> None:
    """Ranks unfroze a layer in one step, and then one of them was replaced: its layer was frozen,
    and the training ended."""
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    if s.step {sign} 3:
        model[0].requires_grad_(True)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=8, epochs=None):
        if s.step == 3 and not model[0].weight.requires_grad:
            model[0].requires_grad_(True)
            net = s.ddp(model)
        nn.functional.mse_loss(net(x), y).backward()
        with s.update():
            opt.step()
            opt.zero_grad()
    """
    done = run(body, FREEZING, inject="kill:rank=1,step=5")
    assert done.returncode == 0 and done.stdout.count("ends at 8") == 2, done.stderr[-4000:]


def test_ranks_that_train_other_parameters_are_refused(run: Program) -> None:
    """gloo aborted the processes."""
    body = USUAL.replace("net =", "model[0].requires_grad_(s.rank == 1)\nnet =")
    words = "s.ddp: requires_grad differs: rank 1 from rank 0 in 0.weight, 0.bias"
    refused(run(body, FREEZING), words)


KEPT = "global KEPT\nKEPT = net = KEPT or {}\n"


@pytest.mark.parametrize("wrap", ["s.ddp(model)", "nn.parallel.DistributedDataParallel(model)"])
def test_a_wrapper_of_an_earlier_world_is_refused(run: Program, wrap: str) -> None:
    """It exchanged no gradients, and the newcomer waited for them without a word."""
    body = USUAL.replace("net = s.ddp(model)\n", KEPT.format(wrap)).replace("steps=4", "steps=8")
    done = run(body, "KEPT = None\n", inject="kill:rank=1,step=5")
    refused(done, "call s.ddp(model) anew whenever the function is entered")


def test_a_group_of_an_earlier_world_is_named(run: Program) -> None:
    kept = KEPT.replace("net", "group").format("dist.new_group()")
    kept += "dist.all_reduce(torch.ones(1), group=group)\n"
    body = USUAL.replace("net = s.ddp", f"{kept}net = s.ddp").replace("steps=4", "steps=8")
    done = run(body, "KEPT = None\n", inject="kill:rank=1,step=5")
    refused(done, "a process group of a world that has ended is used")


GROUPS = """
import functools

GROUP = None

def of_a_global(s):
    global GROUP
    if GROUP is None:
        GROUP = s.new_group()
    return GROUP

GROUPS = {}

def of_a_table(s):
    if "all" not in GROUPS:
        GROUPS["all"] = dist.new_group()
    return GROUPS["all"]

@functools.lru_cache()
def cached():
    return dist.new_group()

class Place:
    group = None

    @classmethod
    def find(cls, s):
        if cls.group is None:
            cls.group = s.new_group()
        return cls.group

MADE = None

def of_each_world(s):
    global MADE
    MADE = s.new_group()
    return MADE

OF = None

def of_this_world(s):
    global OF
    if OF is None or OF[0] != s.generation:
        OF = s.generation, s.new_group()
    return OF[1]
"""


@pytest.mark.parametrize(
    ("find", "name"),
    [
        ("of_a_global(s)", "GROUP"),
        ("of_a_table(s)", "GROUPS"),
        ("cached()", "cached"),
        ("Place.find(s)", "Place.group"),
        ("of_each_world(s)", ""),
        ("of_this_world(s)", ""),
    ],
)
def test_a_group_that_is_made_once_is_told(run: Program, find: str, name: str) -> None:
    """After a fault it was of no use, and a replaced rank waited where it made another one."""
    body = USUAL.replace("s.track(", f"group = {find}\ns.track(")
    body = body.replace(
        "    with s.up", "    dist.all_reduce(torch.ones(1), group=group)\n    with s.up"
    )
    done = run(body, GROUPS)
    if name:
        warned(done, f"{name} (ProcessGroup) belongs to this world, and is made once, or cached")
    else:
        told_nothing(done)


@pytest.mark.parametrize("where", ["s.track(", "net = s.ddp", "for x, y"])
def test_a_group_that_a_replaced_rank_alone_makes_ends_no_wait(run: Program, where: str) -> None:
    """It waited for the others in new_group, and they for it: for half an hour."""
    body = USUAL.replace(where, f"of_a_global(s)\n{where}")
    done = run(body.replace("steps=4", "steps=8"), GROUPS, inject="kill:rank=1,step=5")
    refused(done, "GROUP keeps a process group of a world that has ended")


@pytest.mark.parametrize(
    ("built", "kind"),
    [
        ("lambda: s.ddp(model)", "DistributedDataParallel"),
        ("nn.parallel.DistributedDataParallel, model", "DistributedDataParallel"),
        ("lambda: (1, dist.new_group())", "ProcessGroup"),
        ("lambda number: dist.new_group(), s.generation", ""),
    ],
)
def test_what_holds_a_group_is_not_kept_by_once(run: Program, built: str, kind: str) -> None:
    """The first fault ended the training."""
    done = run(USUAL.replace("net = s.ddp", f"kept = s.once({built})\nnet = s.ddp"))
    if kind:
        refused(done, f"s.once keeps a {kind}, which is of no use after a fault")
    else:
        told_nothing(done)


@pytest.mark.parametrize("call", ["dist.barrier()", "dist.broadcast(model.weight.data, 0)"])
def test_collectives_in_what_once_builds_are_refused(run: Program, call: str) -> None:
    """A replaced rank waited in them for the others, which had built, and they for it."""
    parts = f"""
    def build():
        model = nn.Linear(8, 1)
        {call}
        return model, torch.optim.SGD(model.parameters(), 0.01)
    """
    refused(run(USUAL, parts), "s.once(build) makes collectives")


FIRST = "if not PLACE: dist.barrier(); PLACE.append(1)\n"


@pytest.mark.parametrize(
    "first", [FIRST, "if s.attempt == 1: dist.barrier()\n", "dist.barrier()\n"]
)
def test_collectives_of_the_first_call_alone_are_told(run: Program, first: str) -> None:
    """A replaced rank waited in them for the others, and nothing said why."""
    body = USUAL.replace("s.track(", f"{first}s.track(")
    done = run(body, "PLACE = []\n", inject="exception:rank=1,step=2")
    words = "collectives before s.track were made when the function was called first (1)"
    if first.startswith("if"):
        warned(done, words)
    else:
        assert words not in done.stderr, done.stderr[-4000:]
        assert done.stdout.count("ends at 4") == 2, done.stdout


def test_a_plain_wrapper_that_is_made_anew_is_healed(run: Program) -> None:
    body = USUAL.replace("s.ddp(model)", "nn.parallel.DistributedDataParallel(model)")
    done = run(body.replace("steps=4", "steps=8"), inject="kill:rank=1,step=5")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout


def test_a_wrapper_may_be_used_after_the_training(run: Program) -> None:
    body = USUAL + "\nglobal left\nleft = net\n"
    parts = "import atexit\natexit.register(lambda: say('after', tuple(left(X).shape)))\n"
    done = run(body, parts)
    assert done.stdout.count("after (64, 1)") == 2, done.stderr[-4000:]


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_that_come_once_more_after_a_fault_are_told(run: Program, removed: bool) -> None:
    """One that halves a gradient had it halved twice."""
    body = USUAL.replace("net =", "hook = model.weight.register_hook(lambda grad: grad / 2)\nnet =")
    if removed:
        head, loop = body.split("for x, y", 1)
        body = (
            head + "try:\n" + indent("for x, y" + loop, " " * 4) + "finally:\n    hook.remove()\n"
        )
    done = run(body, inject="exception:rank=0,step=2,phase=backward")
    if removed:
        assert done.returncode == 0 and "hooks on" not in done.stderr, done.stderr
    else:
        warned(done, "hooks on the model are registered anew whenever the function is called")


SLOW = """
class Lookahead(torch.optim.Optimizer):
    '''Keeps slow weights beside what torch's optimizers keep.'''

    def __init__(self, inner):
        self.inner, self.slow, self.count = inner, None, 0
        super().__init__(inner.param_groups, {{}})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.slow is None:
            self.slow = [p.detach().clone() for p in parameters]
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, parameters):
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)
{own}

def build():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, Lookahead(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
"""


OWN = """
    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, values):
        self.inner.load_state_dict(values["inner"])
        self.slow, self.count = values["slow"], values["count"]
"""


def test_an_optimizers_own_state_is_healed(run: Program) -> None:
    parts = SLOW.format(own=OWN)
    body = USUAL.replace("steps=4", "steps=8") + WEIGHTS
    ends = []
    for fault in ("", "kill:rank=1,step=3,phase=update"):
        done = run(body, parts, inject=fault)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "replicas differ" not in done.stderr
        ends.append({line for line in done.stdout.splitlines() if line.startswith("weights")})
    assert ends[0] == ends[1] and len(ends[0]) == 1


def test_state_that_an_optimizer_hides_is_told(run: Program) -> None:
    done = run(USUAL, SLOW.format(own=""))
    warned(done, "opt keeps state where no peer finds it (inner, slow)")


@pytest.mark.parametrize("place", ["an attribute", "its groups"])
def test_a_number_that_an_optimizer_counts_by_itself_is_told(run: Program, place: str) -> None:
    """A replaced rank began with the first one, and was told of when its replica was another."""
    parts = """
    class Warm(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, 0.01)
            self.count = 0

        def step(self):
            self.count += 1
            self.param_groups[0]["lr"] = 0.01 / self.count
            super().step()

    def build():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        return model, Warm(model.parameters())
    """
    if place == "an attribute":
        warned(run(USUAL, parts), "opt.count counts in each step, and no peer finds it")
    else:
        parts = parts.replace("self.count = 0", "self.param_groups[0]['count'] = 0")
        told_nothing(run(USUAL, parts.replace("self.count", "self.param_groups[0]['count']")))


def test_replicas_that_differ_one_step_after_a_healing_are_told(run: Program) -> None:
    """The optimizer's slow weights are in no state_dict, so the newcomer begins without them."""
    done = run(
        USUAL.replace("steps=4", "steps=8"),
        SLOW.format(own=""),
        inject="kill:rank=1,step=3,phase=update",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "replicas differ: rank 1 from rank 0 in model.weight" in done.stderr, done.stderr[-4000:]


def test_averaged_weights_that_are_swapped_in_are_told(run: Program) -> None:
    body = USUAL + "    for p in model.parameters():\n        p.data.copy_(p.data * 0.999)\n"
    warned(run(body), "model.weight, model.bias changed between two updates")


def test_weights_that_are_clipped_through_data_are_told(run: Program) -> None:
    body = USUAL + "    model.weight.data.clamp_(-0.01, 0.01)\n"
    warned(run(body), "model.weight changed between two updates")


def test_a_tracked_average_that_is_updated_outside_is_told(run: Program) -> None:
    body = USUAL.replace("opt=opt)", "opt=opt, average=average)").replace(
        "s.track", "average = s.once(torch.optim.swa_utils.AveragedModel, model)\ns.track", 1
    )
    body += "    average.update_parameters(model)\n"
    warned(run(body), "changed between two updates")


def test_an_object_of_ones_own_that_changes_outside_is_told(run: Program) -> None:
    parts = """
    class Curriculum:
        level = 0

        def state_dict(self):
            return {"level": self.level}

        def load_state_dict(self, values):
            self.level = values["level"]
    """
    body = USUAL.replace("opt=opt)", "opt=opt, curriculum=curriculum)").replace(
        "s.track", "curriculum = s.once(Curriculum)\ns.track", 1
    )
    body += "    curriculum.level += 1\n"
    warned(run(body, parts), "curriculum changed between two updates")


def test_one_rank_that_changes_its_weights_alone_is_told(run: Program) -> None:
    """By default every hundredth step is looked at; here it is every one."""
    body = USUAL.replace("steps=4", "steps=12").replace(
        "        opt.zero_grad()",
        "        opt.zero_grad()\n        if s.rank == 1 and s.step == 6:\n"
        "            model.bias.data[0] += 1e-3",
    )
    done = run(body, options="digest_every=1")
    warned(done, "step 7: replicas differ: rank 1 from rank 0 in model.bias")


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ("sys.exit(0)", ""),
        ("raise ValueError('in the child')", "in the child"),
        ("return", "forked"),
    ],
)
def test_a_child_that_leaves_the_function_is_no_rank(run: Program, leaves: str, words: str) -> None:
    """It took the rank's entry out of the directory, and three errors stood in the log."""
    fork = f"""
    if s.step == 2:
        child = os.fork()
        if child == 0:
            {leaves}
        say("child", os.waitpid(child, 0)[1])
"""
    done = run(USUAL + fork, "import sys")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 4") == 2, done.stdout
    assert done.stdout.count(f"child {256 if words else 0}\n") == 2, done.stdout
    assert words in done.stderr
    assert "takes no part in its training" not in done.stderr
    assert ("Traceback" in done.stderr) == ("raise" in leaves)


def test_a_child_that_imports_the_program_anew_takes_no_seat(tmp_path: Path) -> None:
    """It took the rank's seat, the launcher blamed another training, and the rest waited."""
    program = tmp_path / "train.py"
    program.write_text(
        dedent("""\
        import multiprocessing
        import os

        from slurm_resilience.training import resilient


        @resilient(min_world=1)
        def train(s):
            child = multiprocessing.get_context("spawn").Process(target=os.getpid)
            child.start()
            child.join()
            print("child", child.exitcode, "of seat", s.seat)


        train()
        """)
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    more = {"RANK": "0", "WORLD_SIZE": "1", "SRES_MEET": f"dir:{tmp_path}/meet"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=clean | more | {"SRES_ADDRESS": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "child 1 of seat 0\n"), done.stderr[-4000:]
    assert 'if __name__ == "__main__":' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_in_a_validation_does_not_leave_gradients_off(run: Program) -> None:
    """Nor the dtype that it has set: ranks, and newcomers, may differ in torch's defaults."""
    validation = """
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        dist.barrier()
        if s.rank and s.step == 2 and s.attempt == 1:
            raise RuntimeError("in the validation")
        dist.barrier()
        torch.set_grad_enabled(True)
"""
    ends = set()
    for fault in ("", "kill:rank=1,step=5,phase=update"):
        body = USUAL.replace("steps=4", "steps=8") + indent(dedent(validation), " " * 4) + WEIGHTS
        done = run(body, inject=fault)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.count("in the validation") >= 1
        ends |= {line for line in done.stdout.splitlines() if line.startswith("weights")}
    assert len(ends) == 1


def test_an_interrupt_of_the_programs_own_ends_the_training(run: Program) -> None:
    """It has no Ctrl-C behind it. Each rank was replaced ten times."""
    done = run(USUAL.replace("    nn.f", "    if s.step == 2: raise KeyboardInterrupt\n    nn.f"))
    assert done.returncode != 0
    assert "KeyboardInterrupt; twice in a row at the same place" in done.stderr, done.stderr[-4000:]
    assert done.stderr.count(": a new process") <= 2, done.stderr[-4000:]


def test_torchs_default_device_is_the_programs_own(run: Program) -> None:
    """Tensors of our own went there too: where it is a GPU, no word of the mesh's groups came."""
    body = USUAL.replace("steps=4", "steps=8")
    parts = """
    def build():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        torch.set_default_device("meta")
        return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    """
    done = run(body, parts, inject="kill:rank=1,step=3", options="partner_every=2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fault 1" not in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout


def test_a_drill_strikes_in_a_part_that_ddp_wraps(run: Program) -> None:
    """The forward of what is tracked is never called, as that of a Lightning module: the drill was
    passed over, and nothing said so."""
    body = USUAL.replace("s.track(model=model,", "s.track(model=nn.ModuleDict({'net': model}),")
    done = run(body, inject="exception:rank=1,step=2,phase=backward")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "injected fault (rank 1, step 2, backward)" in done.stderr
