"""The examples and recipes, each through the death of a rank in the middle of an update."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_machine import WarmMachine

pytestmark = pytest.mark.training
torch = pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.errors import UsageError  # noqa: E402
from slurm_resilience.training.recipes import llama, lora  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts/examples"
STEP = re.compile(r"step (\d+) loss ([-+.e\d]+|nan)")
"""Not by lines: two ranks print at once, and one may print before the newline of the other."""
KILL = "kill:rank=1,step=5,phase=update"


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def more_environment(tmp_path: Path, inject: str) -> dict[str, str]:
    return {"SRES_INJECT": inject, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}


@pytest.fixture
def cold(tmp_path: Path) -> Launch:
    """Runs a program as users start it; nothing of the caller's own training or job is
    inherited."""

    def go(*words: str, inject: str = KILL) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
        return subprocess.run(
            [sys.executable, "-m", "slurm_resilience.launcher", *words],
            cwd=ROOT,
            env=clean | more_environment(tmp_path, inject),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return go


@pytest.fixture
def launch(tmp_path: Path, warm_machine: WarmMachine) -> Launch:
    """Runs a program in processes that need not import torch."""

    def go(*words: str, inject: str = KILL) -> subprocess.CompletedProcess[str]:
        return warm_machine.run(words, more_environment(tmp_path, inject), ROOT)

    return go


def went_on(done: subprocess.CompletedProcess[str], steps: int) -> list[tuple[int, float]]:
    """It ended well, a rank was killed and replaced, and no step was lost or done twice."""
    shown = done.stdout[-2000:] + done.stderr[-6000:]
    assert done.returncode == 0, shown
    assert "rank 1: SIGKILL" in done.stderr, shown
    assert "incarnation 1)" in done.stderr, shown
    found = [(int(step), float(loss)) for step, loss in STEP.findall(done.stdout)]
    assert found, shown
    assert [step for step, _ in found] == sorted({step for step, _ in found}), shown
    assert found[-1][0] == steps, shown
    return found


def test_a_plain_loop_ends_as_if_nothing_had_happened(cold: Launch, launch: Launch) -> None:
    words = ("--nproc=2", "--standby=0", str(EXAMPLES / "plain.py"), "--steps=12")
    undisturbed = launch(*words, inject="")
    assert undisturbed.returncode == 0, undisturbed.stderr[-4000:]
    losses = [float(loss) for _, loss in STEP.findall(undisturbed.stdout)]
    assert [loss for _, loss in went_on(cold(*words), 12)] == losses


def test_the_template_ends_well_when_no_step_is_left(launch: Launch, tmp_path: Path) -> None:
    """An attempt may be ended after its last checkpoint; the next one finds nothing to do."""
    template = str(ROOT / "scripts/templates/train_ddp.py")
    words = ("--nproc=1", "--standby=0", template, "--steps=4", "--checkpoint-every=2")
    for _ in range(2):
        done = launch(*words, "--folder", str(tmp_path / "kept"), inject="")
        assert done.returncode == 0, done.stderr[-4000:]
        assert "done: 4 steps" in done.stdout


def test_the_template_lets_go_of_its_wrapper_before_the_group(
    launch: Launch, tmp_path: Path
) -> None:
    """A wrapper that is the last to hold its group waits for gloo's threads with Python's lock
    held, and one of those that still has a tensor waits for that lock: seldom, and for ever."""
    program = tmp_path / "train.py"
    program.write_text(f"""
import gc, runpy
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
end = dist.destroy_process_group
def count_and_end():
    found = [one for one in gc.get_objects() if type(one) is DistributedDataParallel]
    print("wrappers left:", len(found), flush=True)
    end()
dist.destroy_process_group = count_and_end
runpy.run_path({str(ROOT / "scripts/templates/train_ddp.py")!r}, run_name="__main__")
""")
    words = ("--nproc=1", "--standby=0", str(program), "--steps=4", "--checkpoint-every=2")
    for _ in ("with steps", "with none left"):
        done = launch(*words, "--folder", str(tmp_path / "kept"), inject="")
        assert done.returncode == 0, done.stderr[-4000:]
        assert "wrappers left: 0" in done.stdout


def test_ddp_goes_on_with_one_rank_less(launch: Launch, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = launch(
        *("--nproc=2", "--standby=0", str(EXAMPLES / "ddp.py"), "--steps=60"),
        f"--checkpoints={disk}",
    )
    found = went_on(done, 60)
    assert found[-1][1] < found[0][1]
    assert "world 1" in done.stdout
    assert any(disk.iterdir())


def test_any_number_of_ranks_ends_with_the_same_bits(launch: Launch) -> None:
    words = ("--standby=0", str(EXAMPLES / "elastic.py"), "--steps=12", "--same-bits")
    alone = launch("--nproc=1", *words, inject="")
    assert alone.returncode == 0, alone.stderr[-4000:]
    done = launch("--nproc=2", *words)
    # Alone, rank 0 may end before the other is back: of a rank that is not replaced no line tells.
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 1: SIGKILL" in done.stderr, done.stderr[-4000:]
    ends = [re.findall("^parameters (.+)$", one.stdout, re.MULTILINE) for one in (alone, done)]
    assert len(ends[0]) == 1
    # Back at the very last step, the other rank tells of its own as well.
    assert set(ends[0]) == set(ends[1]), done.stderr[-4000:]


def test_a_lost_shard_comes_from_the_other_copy(launch: Launch) -> None:
    done = launch("--nproc=4", "--standby=0", str(EXAMPLES / "fsdp.py"), "--steps=10")
    found = went_on(done, 10)
    assert found[-1][1] < found[0][1]
    assert re.search("rank 1 healed to step [56] from peers", done.stderr), done.stderr[-4000:]


def test_a_model_in_one_copy_goes_back_to_its_checkpoint(launch: Launch, tmp_path: Path) -> None:
    """Each shard is there once; what the lost rank held comes from the disk. The fault is late: by
    then a checkpoint has been written."""
    ends = []
    for inject in ("", KILL.replace("step=5", "step=60")):
        disk = tmp_path / (inject.partition(":")[0] or "undisturbed")
        words = ("--nproc=2", "--standby=0", str(EXAMPLES / "titan.py"), "--steps=64")
        done = launch(*words, f"--checkpoints={disk}", "--every=4", inject=inject)
        assert done.returncode == 0, done.stderr[-4000:]
        ends.append(re.findall("^parameters (.+)$", done.stdout, re.MULTILINE))
    assert "all read the checkpoint of step" in done.stderr, done.stderr[-4000:]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1], done.stderr[-4000:]


def test_an_exit_with_0_in_the_middle_is_a_fault(launch: Launch, tmp_path: Path) -> None:
    """Some library calls os._exit, whatever the program meant."""
    text = (EXAMPLES / "plain.py").read_text()
    line = "        with s.update():"
    leave = """        if s.rank == 1 and s.step == 4 and not int(os.environ["SRES_INCARNATION"]):
            os._exit(0)
"""
    assert text.count(line) == 1
    program = tmp_path / "train.py"
    program.write_text(text.replace(line, leave + line))
    done = launch("--nproc=2", "--standby=0", str(program), "--steps=8", inject="")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 1: exit code 0 in the middle of the training" in done.stderr
    assert [int(step) for step, _ in STEP.findall(done.stdout)] == list(range(1, 9))


@pytest.mark.parametrize("name", ["hf_trainer", "lightning_callback"])
def test_trainers_with_callbacks(launch: Launch, name: str) -> None:
    done = launch("--nproc=2", "--standby=0", str(EXAMPLES / f"{name}.py"), "--steps=25")
    found = went_on(done, 25)
    assert found[-1][1] < found[0][1]


def test_a_recipe_with_adapters(launch: Launch, tmp_path: Path) -> None:
    text = (EXAMPLES / "recipes/llama_lora.toml").read_text()
    file = tmp_path / "recipe.toml"
    file.write_text(text.replace("steps = 60", "steps = 15").replace("every = 10", "every = 1"))
    found = went_on(launch("--recipe", str(file), "--standby=1"), 15)
    assert found[-1][1] < found[0][1]


TRAINERS = {
    "transformers_trainer": ("accelerate", "transformers", "transformers.trainer"),
    "lightning_trainer": ("lightning", "lightning.fabric.plugins.environments"),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_real_trainers_end_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """Undisturbed, with a rank that is killed in an update, and with an error in a backward. Both
    models drop out: numbers that began anew would show. The loss that is told is each step's own:
    one was divided by all steps before it."""
    machine = WarmMachine(tmp_path, modules=TRAINERS[name])
    words = ("--nproc=2", "--standby=0", str(EXAMPLES / f"{name}.py"), "--steps=12")
    ends: list[list[str]] = []
    undisturbed: list[tuple[int, float]] = []
    try:
        for inject in ("", KILL, "exception:rank=0,step=6,phase=backward"):
            done = machine.run(words, more_environment(tmp_path, inject), ROOT)
            assert done.returncode == 0, done.stderr[-4000:]
            if not inject:
                undisturbed = [(int(step), float(loss)) for step, loss in STEP.findall(done.stdout)]
            if inject == KILL:
                assert went_on(done, 12) == undisturbed
            ends.append(re.findall("^parameters (.+)$", done.stdout, re.MULTILINE))
    finally:
        machine.end()
    assert len(ends[0]) == 1
    assert ends[0] == ends[1] == ends[2], ends


STOPPING = {
    "transformers_trainer": (
        (
            'save_strategy="no"',
            'save_strategy="no", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss"',
        ),
        (
            "model=model,\n            args",
            "eval_dataset=torch.utils.data.Subset(Counting(), range(8)), model=model,\n"
            "            args",
        ),
        (
            "callbacks=[Printer()]",
            "callbacks=[transformers.EarlyStoppingCallback(6, 1e9)] + ([Printer()]",
        ),
        ("if s.rank == 0 else [],", "if s.rank == 0 else []),"),
    ),
    "lightning_trainer": (
        (
            "    def configure_optimizers(self)",
            """    def validation_step(self, batch, number):
        self.log("loss", batch.sum())

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.Subset(Points(), range(8)), 8)

    def configure_optimizers(self)""",
        ),
        ("max_epochs=1,", "max_epochs=1, num_sanity_val_steps=0, val_check_interval=2,"),
        ("logger=False,", "logger=Told() if s.rank == 0 else False, log_every_n_steps=1,"),
        (
            "class Printer(",
            """class Told(lightning.pytorch.loggers.logger.Logger):
    name, version = "told", 0

    def log_metrics(self, metrics, step=None):
        print(f"logged {step} {metrics}", flush=True)

    def log_hyperparams(self, *_, **__):
        pass


class Printer(""",
        ),
        (
            "callbacks=[callback,",
            "callbacks=[callback, lightning.pytorch.callbacks.EarlyStopping("
            '"loss", patience=3, min_delta=1e9),',
        ),
    ),
}


@pytest.mark.parametrize(("name", "last"), [("transformers_trainer", 7), ("lightning_trainer", 8)])
def test_early_stopping_counts_on_after_a_fault(tmp_path: Path, name: str, last: int) -> None:
    """It began to count anew, and the training ended later, on all ranks alike. A rank that dies
    right after an update takes part in no evaluation after it: that is made up for."""
    text = (EXAMPLES / f"{name}.py").read_text()
    for old, new in STOPPING[name]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    program = tmp_path / "train.py"
    program.write_text(text)
    for module in ("hf_trainer", "lightning_callback"):
        (tmp_path / f"{module}.py").write_text((EXAMPLES / f"{module}.py").read_text())
    machine = WarmMachine(tmp_path, modules=TRAINERS[name])
    ends, logged = [], []
    faults = (
        "",
        KILL,
        "exception:rank=0,step=4,phase=backward",
        f"kill:rank=1,step={last},phase=after-update",
        f"exception:rank=0,step={last},phase=after-update",
    )
    try:
        for inject in faults:
            words = ("--nproc=2", "--standby=0", str(program), "--steps=30")
            done = machine.run(words, more_environment(tmp_path, inject), ROOT)
            assert done.returncode == 0, done.stderr[-4000:]
            assert ("fault 1" in done.stderr or "SIGKILL" in done.stderr) == bool(inject)
            # By the parameters: a fault after an update leaves its line out.
            ends.append(set(re.findall("^parameters (.+)$", done.stdout, re.MULTILINE)))
            logged.append(set(re.findall("^logged .+$", done.stdout, re.MULTILINE)))
            if not inject:
                assert int(STEP.findall(done.stdout)[-1][0]) == last
    finally:
        machine.end()
    assert len(ends[0]) == 1
    assert ends == ends[:1] * len(faults)
    assert logged[0] == logged[1], "steps of a Trainer's logger began anew"


def test_trainers_refuse_what_a_fault_would_spoil(tmp_path: Path) -> None:
    """The weights of the best step would be in place of the last one's, which others need, those
    of a checkpoint in place of the session's; a schedule by epochs would never step."""
    cases = [
        (
            "transformers_trainer",
            'save_strategy="no"',
            'save_strategy="steps", eval_strategy="steps", load_best_model_at_end=True',
            "load_best_model_at_end=True changes the weights",
        ),
        (
            "transformers_trainer",
            "        trainer.train()",
            "        trainer.train(resume_from_checkpoint=True)",
            "resume_from_checkpoint would put back an older state",
        ),
        (
            "lightning_trainer",
            "lambda: opt  #",
            "lambda: ([opt], [torch.optim.lr_scheduler.StepLR(opt, 1)])  #",
            'give it interval="step"',
        ),
    ]
    for module in ("hf_trainer", "lightning_callback"):
        (tmp_path / f"{module}.py").write_text((EXAMPLES / f"{module}.py").read_text())
    for number, (name, old, new, words) in enumerate(cases):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert text.count(old) == 1
        program = tmp_path / f"{name}.py"
        program.write_text(text.replace(old, new))
        machine = WarmMachine(tmp_path, name=str(number), modules=TRAINERS[name])
        try:
            argv = ("--nproc=2", "--standby=0", str(program), "--steps=4")
            done = machine.run(argv, more_environment(tmp_path, ""), ROOT)
        finally:
            machine.end()
        assert done.returncode == 76
        assert words in done.stderr
        assert "fault 2" not in done.stderr


@pytest.mark.parametrize("shape", ["gpt_oss", "deepseek", "qwen"])
def test_a_recipe_of_each_shape_ends_with_the_same_bits(
    launch: Launch, tmp_path: Path, shape: str
) -> None:
    file = tmp_path / "recipe.toml"
    text = (EXAMPLES / f"recipes/{shape}_tiny.toml").read_text()
    file.write_text(f"{text}width = 32\nlayers = 2\n[train]\nsteps = 8\nlog_every = 1\n")
    words = ("--standalone", "--recipe", str(file), "--nproc-per-node=2", "--standby=0")
    undisturbed = launch(*words, inject="")
    assert undisturbed.returncode == 0, undisturbed.stderr[-4000:]
    killed = launch(*words)
    went_on(killed, 8)
    ends = [
        re.findall("^parameters (.+)$", one.stdout, re.MULTILINE) for one in (undisturbed, killed)
    ]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1], killed.stderr[-4000:]


@pytest.mark.parametrize(
    ("names", "words"),
    [(("query", "valeu"), "no linear layer is called valeu"), ((), "no layer is named")],
)
def test_a_layer_that_is_misspelt_in_a_recipe_is_refused(
    names: tuple[str, ...], words: str
) -> None:
    """The others got adapters, and nothing said that this one did not."""
    model = llama.Llama(llama.LlamaShape(width=16, layers=1, heads=2, context=8))
    with pytest.raises(UsageError, match=words):
        lora.adapt(model, 2, 4.0, names)
    assert all(parameter.requires_grad for parameter in model.parameters())
