"""Recipes: what they may say, and the model that they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher.recipe_file import Recipe, read

RECIPES = Path(__file__).parents[2] / "scripts/examples/recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipes_that_come_along(path: Path) -> None:
    recipe = read(str(path))
    name = path.stem.rpartition("_")[0].replace("_", "-")
    assert recipe.model.shape == name
    # The other shapes' files say little more than how many nodes there are.
    assert recipe.nodes.ranks_per_node == (2 if name == "llama" else 1)
    assert (recipe.lora.rank > 0) == ("lora" in path.stem)


def test_an_empty_recipe_is_one(tmp_path: Path) -> None:
    (tmp_path / "r.toml").touch()
    assert read(str(tmp_path / "r.toml")) == Recipe()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[train]\nstep = 3", "step"),
        ("[train]\nsteps = 0", "steps"),
        ("[train]\nsteps = 'many'", "steps"),
        ("[nodes]\nmin_nodes = 3\nmax_nodes = 2", "max_nodes"),
        ("[model]\nwidth = 30", "width"),
        ("[train]\nlearning_rate = inf", "learning_rate"),
        ("[train]\nlearning_rate = nan", "learning_rate"),
        ("[train]\nseed = 9223372036854775808", "seed"),
        ("[lora]\nrank = 100000000", "rank of an adapter"),
        ("[model", "r.toml"),
        ("[weather]", "weather"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=word) as caught:
        read(str(file))
    assert "\n" not in str(caught.value)


def test_no_such_recipe() -> None:
    with pytest.raises(UsageError, match="No such file"):
        read("/no/such.toml")


def test_data_that_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """A directory has a size, too; torch said of it that it cannot be mapped."""
    pytest.importorskip("torch", reason="torch is not installed")
    from slurm_resilience.training.recipes.train import TokenWindows

    with pytest.raises(UsageError, match="no plain file"):
        TokenWindows(str(tmp_path), 8)


class TestModel:
    """Needs torch, but no process of its own."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch", reason="torch is not installed")

    @pytest.mark.parametrize("shape", ["llama", "gpt-oss", "deepseek", "qwen"])
    def test_the_future_is_not_seen(self, shape: str, tmp_path: Path) -> None:
        import torch

        from slurm_resilience.training.recipes.llama import loss
        from slurm_resilience.training.recipes.train import build

        file = tmp_path / "r.toml"
        file.write_text(f'[model]\nshape = "{shape}"\nwidth = 32\nlayers = 2\ncontext = 8')
        model, _ = build(read(str(file)))
        tokens = torch.arange(8)[None]
        other = tokens.clone()
        other[0, 5:] = 77
        first, second = model(tokens), model(other)
        assert torch.equal(first[0, :5], second[0, :5])
        assert not torch.allclose(first[0, 5:], second[0, 5:])
        torch.autograd.backward(loss(first, tokens))
        # DDP waits for all of them in each step.
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_rotary_depends_on_distance_alone(self) -> None:
        import torch

        from slurm_resilience.training.recipes.llama import rotary, turn

        cosines, sines = rotary(16, 8)
        generator = torch.Generator().manual_seed(0)
        query, key = (torch.randn(8, generator=generator).expand(16, 8) for _ in range(2))
        scores = turn(query, cosines, sines) @ turn(key, cosines, sines).T
        for shift in (1, 5):
            along = scores.diagonal(shift)
            assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)
        assert torch.allclose(turn(query, cosines, sines).norm(dim=-1), query.norm(dim=-1))

    def test_the_same_seed_is_the_same_model(self) -> None:
        import torch

        from slurm_resilience.training.recipes.llama import Llama, LlamaShape

        torch.manual_seed(1)
        before = torch.get_rng_state()
        first, second = (Llama(LlamaShape(width=16, heads=2, layers=1), seed=3) for _ in range(2))
        assert torch.equal(torch.get_rng_state(), before)
        for name, value in first.state_dict().items():
            assert torch.equal(value, second.state_dict()[name]), name

    def test_an_adapter_changes_nothing_at_first_and_trains_alone(self) -> None:
        import torch

        from slurm_resilience.training.recipes import lora
        from slurm_resilience.training.recipes.llama import Llama, LlamaShape, loss

        shape = LlamaShape(width=16, heads=2, layers=2, context=4)
        model, plain = Llama(shape), Llama(shape)
        names = lora.adapt(model, rank=2, alpha=4.0, names={"query", "value"})
        assert names == [f"blocks.{i}.attention.{n}" for i in (0, 1) for n in ("query", "value")]
        tokens = torch.tensor([[1, 2, 3, 4]])
        assert torch.equal(model(tokens), plain(tokens))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {f"{name}.{part}" for name in names for part in "ab"}
        torch.autograd.backward(loss(model(tokens), tokens))
        grads = {name for name, p in model.named_parameters() if p.grad is not None}
        assert grads == trained
        # W x + (alpha / rank) B A x, against one merged matrix.
        layer = model.get_submodule(names[0])
        assert isinstance(layer, lora.Adapted)
        torch.nn.init.normal_(layer.b)
        x = torch.randn(3, 16)
        merged = layer.base.weight + 4.0 / 2 * layer.b @ layer.a
        assert torch.allclose(layer(x), x @ merged.T, atol=1e-5)
        with pytest.raises(UsageError, match="nothing"):
            lora.adapt(model, 2, 4.0, {"nothing"})
