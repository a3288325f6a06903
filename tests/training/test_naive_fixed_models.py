"""Programs with a model that does not train: whether all ranks have the same one."""

from __future__ import annotations

import pytest
from naive import USUAL, Program, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

FROZEN = "\nteacher = nn.Linear(8, 1).requires_grad_(False)\n"
BODY = USUAL.replace("(net(x), y)", "(net(x), teacher(x))")
LINE = "models that do not train differ: rank 1 from rank 0 in"


def test_a_teacher_of_each_ranks_own_is_told(run: Program) -> None:
    """The ranks trained towards two teachers, and a replaced one towards a third."""
    done = run("\ntorch.manual_seed(7 + s.rank)" + FROZEN + BODY)
    warned(done, f"{LINE} teacher")


def test_so_is_one_that_is_only_in_eval_mode_and_global(run: Program) -> None:
    parts = """
    torch.manual_seed(int(os.environ["RANK"]))
    teachers = {"first": nn.Sequential(nn.Linear(8, 1)).eval()}
    """
    body = BODY.replace("teacher(x)", "teachers['first'](x).detach()")
    warned(run(body, parts), f"{LINE} teachers['first']")


@pytest.mark.parametrize(
    "made",
    [
        "\ntorch.manual_seed(7)" + FROZEN,
        "\ntorch.manual_seed(7)" + FROZEN + "judge = s.rank or nn.Linear(8, 1).eval()\n",
    ],
    ids=["the same on all ranks", "another one on one rank alone"],
)
def test_models_that_are_the_same_are_told_nothing(run: Program, made: str) -> None:
    told_nothing(run(made + BODY))


def test_a_tracked_one_is_healed_and_told_nothing(run: Program) -> None:
    parts = """
    def build_both():
        model, opt = build()
        torch.manual_seed(int(os.environ["RANK"]))
        return model, opt, nn.Linear(8, 1).requires_grad_(False)
    """
    body = BODY.replace("model, opt = s.once(build)", "model, opt, teacher = s.once(build_both)")
    told_nothing(run(body.replace("opt=opt)", "opt=opt, teacher=teacher)"), parts))
