"""Programs whose updates, rates, seeds or gradients break a rule: each is refused, or told of
within two steps, without waiting for a fault."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from naive import USUAL, WEIGHTS, Program, refused, told_nothing, warned

pytestmark = pytest.mark.training
torch = pytest.importorskip("torch", reason="torch is not installed")


def test_a_schedule_that_steps_after_the_update_is_told(run: Program) -> None:
    parts = """
    def build_all():
        model, opt = build()
        return model, opt, torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    """
    body = USUAL.replace("model, opt = s.once(build)", "model, opt, schedule = s.once(build_all)")
    body = body.replace("opt=opt)", "opt=opt, schedule=schedule)") + "    schedule.step()\n"
    once = body.replace("    schedule.step()", "    if s.step == 2: schedule.step()")
    for done in (run(body, parts), run(once, parts)):
        warned(done, "schedule steps outside of s.update()")
        assert "a learning rate is set" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize(
    "update",
    ["s.update()\n    opt.step()", "opt.step()\n    with s.update():\n        pass"],
    ids=["without with", "before it"],
)
def test_an_optimizer_that_steps_outside_is_told(run: Program, update: str) -> None:
    """Without any update it was told after a hundred batches; else in words on loaded weights."""
    steps = "    with s.update():\n        opt.step()\n        opt.zero_grad()"
    done = run(USUAL.replace(steps, f"    {update}\n    opt.zero_grad()"))
    warned(done, "an optimizer steps outside of s.update()")
    assert "changed between" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize("when", ["s.step % 4 == 3", "s.step % 4 == 0"])
def test_gradients_that_are_added_up_over_updates_are_told(run: Program, when: str) -> None:
    """After a fault the step was made with the gradients of some of its batches."""
    step = f"        if {when}:\n            opt.step()\n            opt.zero_grad()\n"
    body = USUAL.replace("        opt.step()\n        opt.zero_grad()\n", step)
    warned(run(body), "its gradients were kept for the next one")


@pytest.mark.parametrize("where", ["at its end", "before each batch"])
def test_an_update_that_skips_its_step_is_told_nothing(run: Program, where: str) -> None:
    body = USUAL.replace("opt.step()", "s.step < 1 or opt.step()")
    if where == "before each batch":
        body = body.replace("        opt.zero_grad()\n", "")
        body = body.replace("    nn.functional", "    opt.zero_grad()\n    nn.functional")
    told_nothing(run(body))


@pytest.mark.parametrize("place", ["before a batch's forward", "after track"])
def test_a_learning_rate_that_is_set_outside_is_told(run: Program, place: str) -> None:
    """One that was halved before a fault was halved once more after it."""
    by_hand = "for group in opt.param_groups: group['lr'] *= 0.5\n"
    if place == "after track":
        body = USUAL.replace("net = s.ddp", f"{by_hand}net = s.ddp")
    else:
        body = USUAL.replace(
            "    nn.functional", f"    if s.step == 3:\n        {by_hand}    nn.functional"
        )
    warned(run(body), "a learning rate is set outside of s.update()")


RATE = "for group in opt.param_groups: group['lr'] {}\n"


@pytest.mark.parametrize(
    "rate",
    ["= 0.01 / (1 + s.step)", "= 0.01 if s.step < 6 else 0.001"],
    ids=["another in each step", "the same for some steps"],
)
def test_a_learning_rate_that_is_set_in_each_step_is_told_nothing(run: Program, rate: str) -> None:
    """A step that is repeated sets it again."""
    body = USUAL.replace("steps=4", "steps=10").replace(
        "    nn.functional", f"    {RATE.format(rate)}    nn.functional"
    )
    told_nothing(run(body))
    done = run(body, inject="exception:rank=1,step=3,phase=backward")
    assert done.returncode == 0 and "learning rate" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize("rate", ["*= 0.9", "= 0.01 * 0.9 ** count; count += 1"])
def test_a_learning_rate_that_a_repeated_step_sets_otherwise_is_told(
    run: Program, rate: str
) -> None:
    body = USUAL.replace("steps=4", "steps=8").replace(
        "    nn.functional", f"    {RATE.format(rate)}    nn.functional"
    )
    body = body.replace("net = s.ddp", "count = 0\nnet = s.ddp")
    # Rank 0 tells, so the fault comes on it: after it has set the rate, however slow the other is.
    done = run(body, inject="exception:rank=0,step=3,phase=backward")
    warned(done, "a learning rate was set outside of s.update() in step 4, and to another number")


def test_a_learning_rate_that_one_rank_alone_sets_twice_is_told(run: Program) -> None:
    """The fault reaches rank 0 in the same step, before it sets the rate."""
    rate = RATE.format("*= 0.9")
    waits = f"""
    if s.rank == 1:
        {rate}
    if s.step == 3 and s.generation == 1:
        if s.rank == 0:
            open(f"{{__file__}}.here", "w").close()
        while s.rank == 0 or not os.path.exists(f"{{__file__}}.here"):
            time.sleep(0.01)
    if s.rank == 0:
        {rate}"""
    body = USUAL.replace("steps=4", "steps=8").replace(
        "    nn.functional", f"{waits}    nn.functional"
    )
    done = run(body, "import time\n", inject="exception:rank=1,step=3,phase=backward")
    warned(done, "step 4: replicas differ: rank 1 from rank 0")


@pytest.mark.parametrize("ends", ["raise ValueError", "os.kill(os.getpid(), 9)"])
def test_a_learning_rate_is_told_by_a_rank_that_has_set_it_twice(run: Program, ends: str) -> None:
    """Rank 0 is a step behind, and is healed from the one that has set it already."""
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=8, epochs=None):
        {RATE.format("*= 0.9")}
        if s.rank == 1 and s.step == 4:
            open(f"{{__file__}}.set", "w").close()
        nn.functional.mse_loss(net(x), y).backward()
        if s.rank == 0 and s.step == 3 and s.generation == 1:
            while not os.path.exists(f"{{__file__}}.set"):
                time.sleep(0.01)
            {ends}
        with s.update():
            opt.step()
            opt.zero_grad()
    """
    done = run(body, "import time\n")
    warned(done, "a learning rate was set outside of s.update() in step 5, and to another number")


@pytest.mark.parametrize(
    ("made", "steps"),
    [("schedule = s.once(Warmup, opt)", "schedule.step()"), ("count = 0", "count += 1")],
    ids=["an object", "a local variable"],
)
@pytest.mark.parametrize("where", ["in the update", "before it"])
def test_a_learning_rate_that_counts_by_itself_is_told(
    run: Program, made: str, steps: str, where: str
) -> None:
    """It began anew after a fault: on all ranks, where no comparison tells, or on one of them."""
    parts = """
    class Warmup:
        def __init__(self, opt):
            self.opt, self.count = opt, 0

        def step(self):
            self.count += 1
            for group in self.opt.param_groups: group["lr"] = 0.001 * self.count
    """
    if made == "count = 0":
        steps += "; opt.param_groups[0]['lr'] = 0.001 * count"
    place = "        opt.step()" if where == "in the update" else "    with s.update"
    indented = " " * (len(place) - len(place.lstrip())) + steps
    body = USUAL.replace("net = s.ddp", f"{made}\nnet = s.ddp")
    body = body.replace(place, f"{indented}\n{place}")
    warned(run(body, parts), "neither s.step nor anything that is tracked says how far it is")


@pytest.mark.parametrize(
    ("rate", "is_told"),
    [("0.01 / (1 + count); count += 1", True), ("0.01 / (1 + step.consumed)", False)],
    ids=["by itself", "by the samples"],
)
def test_a_learning_rate_that_counts_microbatches_is_told(
    run: Program, rate: str, is_told: bool
) -> None:
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    count = 0
    for step in s.microbatches(DATA, net, size=2, count=4, steps=5, epochs=None):
        for x, y in step:
            step.backward(nn.functional.mse_loss(net(x), y))
        with s.update():
            opt.param_groups[0]["lr"] = {rate}
            opt.step()
    """
    done = run(body)
    if is_told:
        warned(done, "neither s.step nor anything that is tracked says how far it is")
    else:
        told_nothing(done)


@pytest.mark.parametrize("rate", ["*= 0.9", "= (0.01, 0.01, 0.001, 0.001)[s.step]"])
def test_a_learning_rate_that_follows_from_the_state_is_told_nothing(
    run: Program, rate: str
) -> None:
    told_nothing(run(USUAL + f"        {RATE.format(rate)}"))


SEEDING = "torch.manual_seed({})\nnet = s.ddp"


@pytest.mark.parametrize("seed", ["s.rank", "1234 + s.rank"])
def test_a_seed_after_track_is_told(run: Program, seed: str) -> None:
    """The masks of the first steps came again after each fault. Rank 0 has the seed of before."""
    body = USUAL.replace("net = s.ddp", SEEDING.format(seed))
    warned(run(body), "torch was seeded anew after s.track")


def test_a_seed_before_track_or_by_the_step_is_told_nothing(run: Program) -> None:
    body = USUAL.replace("net = s.ddp", SEEDING.format("s.rank + 1000 * s.step"))
    body = body.replace("s.track", "torch.manual_seed(s.rank)\ns.track")
    told_nothing(run(body))


DRAWN = """
    x = X[torch.randint(64, (4,))]
    nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
    inject.point("before-backward", step=s.step, rank=s.rank)
"""


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("seed", ["s.rank", "1000 * s.step + s.rank", "7"])
def test_random_numbers_that_come_twice_after_a_fault_are_told(
    run: Program, seed: str, killed: int
) -> None:
    """A replaced rank drew the same batches as the one that healed it, to the end."""
    begin = USUAL[: USUAL.index("for x")]
    loop = "while s.step < 8:"
    if "step" in seed:
        loop += f"\n    torch.manual_seed({seed})"
    else:
        begin = begin.replace("s.track", f"torch.manual_seed({seed})\ns.track")
    done = run(begin + loop + DRAWN, inject=f"kill:rank={killed},step=4")
    words = "ranks 0, 1 draw the same random numbers, and drew others before the fault"
    if seed == "s.rank":
        warned(done, words)
    else:
        assert done.returncode == 0 and "random numbers" not in done.stderr, done.stderr[-4000:]


def test_random_numbers_that_come_apart_by_unequal_shares_are_told_nothing(run: Program) -> None:
    """Ranks that were seeded alike drew other numbers after the last batch of an epoch, of which
    one has a sample more: a fault made them draw the same once more, as they did at first."""
    body = USUAL.replace("epochs=None", "epochs=None, drop_last=False").replace("=4", "=14")
    body = body.replace("net(x)", "net(x + 0.1 * torch.randn(x.shape))")
    done = run(
        body.replace("s.track", "torch.manual_seed(7)\ns.track"),
        "DATA = TensorDataset(X[:63], X[:63].sum(1, keepdim=True))",
        options="digest_every=1",
        inject="kill:rank=1,step=10",
    )
    assert done.returncode == 0 and "generation 2" in done.stderr, done.stderr[-4000:]
    assert "random numbers" not in done.stderr, done.stderr[-4000:]


def test_ranks_that_draw_nothing_are_told_nothing_of_random_numbers(run: Program) -> None:
    """Processes that nothing seeds differ in them, as those of the first example do: a replaced
    rank was told that it draws what another does."""
    body = USUAL.replace("s.track", "torch.manual_seed(s.rank)\ns.track").replace("=4", "=8")
    done = run(body, inject="kill:rank=1,step=4")
    assert done.returncode == 0 and "generation 2" in done.stderr, done.stderr[-4000:]
    assert "random numbers" not in done.stderr, done.stderr[-4000:]


def test_random_numbers_that_become_the_same_without_a_fault_are_told_nothing(
    run: Program,
) -> None:
    """They were said to be the same since a fault."""
    begin = USUAL[: USUAL.index("for x")]
    loop = "while s.step < 8:\n    torch.manual_seed(s.rank if s.step < 4 else s.step)"
    done = run(begin + loop + DRAWN, options="digest_every=1")
    told_nothing(done)


FALLS = "torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n))"
CYCLE = "torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)"


@pytest.mark.parametrize("made", [FALLS, CYCLE], ids=["falls", "a cycle"])
@pytest.mark.parametrize("inject", ["kill:rank=1,step=5", "exception:rank=0,step=5"])
def test_a_schedule_that_the_function_makes_anew_goes_on(
    run: Program, made: str, inject: str
) -> None:
    """It set the learning rate of the first step, with which the one after a fault was made."""
    body = USUAL.replace("steps=4", "steps=8").replace("opt=opt)", "opt=opt, schedule=schedule)")
    body = body.replace("s.track", f"schedule = {made}\ns.track", 1)
    body = body.replace("        opt.z", "        schedule.step()\n        opt.z") + WEIGHTS
    ends = [run(body, inject=fault) for fault in ("", inject)]
    found = [{x for x in done.stdout.splitlines() if "weights" in x} for done in ends]
    assert all(done.returncode == 0 for done in ends), ends[1].stderr[-4000:]
    assert len(found[0]) == 1 and found[0] == found[1], ends[1].stderr[-4000:]


def test_a_learning_rate_that_is_set_inside_is_told_nothing(run: Program) -> None:
    by_hand = "for group in opt.param_groups: group['lr'] = 0.01 / (1 + s.step)\n"
    told_nothing(run(USUAL.replace("        opt.step()", f"        {by_hand}        opt.step()")))


PARTS_UNUSED = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.calls = nn.Linear(8, 1), nn.Linear(8, 1), []

    def forward(self, x):
        self.calls.append(1)
        return self.used(x) if {unused} else self.used(x) + self.unused(x)

def build():
    torch.manual_seed(0)
    model = Two()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize("wrapped", ["s.ddp(model)", "nn.parallel.DistributedDataParallel(model)"])
@pytest.mark.parametrize("unused", ["True", "dist.get_rank() == 1 and len(self.calls) == 3"])
def test_gradients_that_ddp_has_not_exchanged_are_refused(
    run: Program, wrapped: str, unused: str
) -> None:
    """torch says so at the next forward. That was taken for a fault, and repeated: in each step the
    replicas were changed by gradients of their own, and the training ended with success."""
    done = run(USUAL.replace("s.ddp(model)", wrapped), PARTS_UNUSED.format(unused=unused))
    refused(done, "were not exchanged between the ranks")
    assert "unused.weight, unused.bias" in done.stderr


def test_parameters_without_a_use_that_ddp_is_told_of_are_taken(run: Program) -> None:
    more = "s.ddp(model, find_unused_parameters=True)"
    told_nothing(run(USUAL.replace("s.ddp(model)", more), PARTS_UNUSED.format(unused="True")))


MICROBATCHES = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = {net}
for step in s.microbatches(DATA, net, size=2, count=4, steps=4, epochs=None):
    for x, y in step:
        {before}
        step.backward(nn.functional.mse_loss(net(x), y))
        {after}
    with s.update():
        opt.step()
"""


@pytest.mark.parametrize("net", ["s.ddp(model)", "model"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("opt.zero_grad()", ""),
        ("", "nn.utils.clip_grad_norm_(model.parameters(), 1e-3)"),
        ("model.weight.square().sum().backward()", ""),
    ],
    ids=["zero_grad", "clipping", "another backward"],
)
def test_gradients_that_change_between_microbatches_are_refused(
    run: Program, net: str, before: str, after: str
) -> None:
    """A step was made with the last microbatch alone, without a word."""
    done = run(MICROBATCHES.format(net=net, before=before, after=after))
    refused(done, "the gradients were changed between two microbatches of a step")


@pytest.mark.parametrize("net", ["s.ddp(model, gradient_as_bucket_view=True)", "model"])
def test_microbatches_without_a_change_are_told_nothing(run: Program, net: str) -> None:
    told_nothing(run(MICROBATCHES.format(net=net, before="", after="")))


def test_collectives_in_an_update_are_told(run: Program) -> None:
    body = USUAL.replace("    with s.update():", "    with s.update():\n        average(model, 1)")
    warned(run(body), "collectives inside of s.update()")


@pytest.mark.parametrize("steps", [4, 5])
def test_a_run_ends_with_a_checkpoint_where_the_last_due_one_was_skipped(
    run: Program, tmp_path: Path, steps: int
) -> None:
    """The one before was still being written, and what the last steps had made was on no disk. What
    the program does with its model after the loop is in none."""
    from slurm_resilience.training import Checkpointer

    parts = """
    import time
    from slurm_resilience.training import Checkpointer
    from slurm_resilience.training.checkpoint import writing

    sums = writing._sums

    def slow(*args):
        time.sleep(1.5)
        return sums(*args)

    writing._sums = slow
    keeper = Checkpointer(os.environ["TMPDIR"] + "/kept", every=2)
    """
    body = USUAL.replace("steps=4", f"steps={steps}") + "\nmodel.weight.data.zero_()\n"
    done = run(body, parts, options="checkpointer=keeper")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "checkpoint of step 4 is skipped" in done.stderr, done.stderr[-4000:]
    model, keeper = torch.nn.Linear(8, 1), Checkpointer(tmp_path / "0" / "kept")
    assert keeper.readable() == steps
    keeper.load(steps, {"model": model})
    assert model.weight.any()


def test_a_checkpoint_does_not_hold_up_a_loader_for_each_epoch(run: Program) -> None:
    """The first loader's end waited until what was under way was on the disk."""
    parts = """
    import threading
    from slurm_resilience.training import Checkpointer
    from slurm_resilience.training.checkpoint import writing

    second, sums = threading.Event(), writing._sums

    def slow(*args):
        say("written in the second epoch:", second.wait(20))
        return sums(*args)

    writing._sums = slow
    keeper = Checkpointer(os.environ["TMPDIR"] + "/kept", every=2)
    """
    begin, loop = USUAL.split("for x", 1)
    loop = textwrap.indent("for x" + loop.replace("steps=4", "name=str(epoch), steps=2"), "    ")
    body = f"{begin}for epoch in range(2):\n    epoch and second.set()\n{loop}"
    done = run(body, parts, options="checkpointer=keeper")
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(re.findall("epoch: (.*)", done.stdout)) == {"True"}, done.stdout
