"""Rates and phases of a recipe, and options that cannot be meant."""

from pathlib import Path

import pytest
from torch import nn

from attnlib.convert import RequestError
from attnlib.finetune.recipe import FINAL_RATE, Recipe
from attnlib.finetune.settings import LORA_RATE, RATE, Settings
from attnlib.finetune.training import make_optimizer

PLACES = {"source": Path("a"), "out": Path("b"), "teacher": Path("c"), "text": (Path("d"),)}


def test_the_rate_rises_to_its_peak_and_falls_to_a_share_of_it():
    recipe = Recipe(100, 4, 16, 2e-3, 25, warm_up=0.1)
    rates = [recipe.rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([2e-4 * (n + 1) for n in range(10)])
    assert rates[10] == max(rates) == pytest.approx(2e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert recipe.rate_at(100) == pytest.approx(FINAL_RATE * 2e-3)
    assert Recipe(1, 4, 16, 2e-3, 1, warm_up=0.0).rate_at(0) == pytest.approx(2e-3)


@pytest.mark.parametrize(("share", "alone"), [(0, 0), (0.25, 25), (1, 100)])
def test_progress_begins_where_layers_have_learnt_alone(share, alone):
    recipe = Recipe(100, 4, 16, 2e-3, 30, layerwise=share)
    assert recipe.alone == alone
    assert recipe.progress(alone) == 0
    assert recipe.progress(100) == (1 if alone < 100 else 0)
    assert [step for step in range(1, 101) if recipe.is_point(step)] == [30, 60, 90, 100]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("steps", 0),
        ("batch", -1),
        ("context", 0),
        ("accumulate", 0),
        ("windows", 0),
        ("lora", 0),
        ("save_every", 0),
        ("rate", 0.0),
        ("rate", float("nan")),
        ("clip", float("inf")),
        ("decay", -0.1),
        ("layerwise", 1.5),
        ("warm_up", -0.1),
        ("seed", -1),
        ("text", ()),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_its_name(option, value):
    Settings(**PLACES).check()
    with pytest.raises(RequestError, match=f"^--{option.replace('_', '-')}: expected .*, got"):
        Settings(**PLACES | {option: value}).check()


def test_a_batch_has_to_have_a_part_for_each_rank():
    settings = Settings(**PLACES, batch=12, accumulate=3)
    settings.check_parts(4)
    with pytest.raises(RequestError, match=r"--batch: expected a multiple of 15, the ranks \(5\) .*, got 12"):
        settings.check_parts(5)


def test_defaults_that_follow_from_others():
    assert Settings(**PLACES).recipe.rate == RATE
    assert Settings(**PLACES, lora=4).recipe.rate == LORA_RATE
    assert Settings(**PLACES, steps=17).recipe.every == 3
    assert [Settings(**PLACES, device=device).half for device in ("cpu", "cuda")] == [False, True]
    assert Settings(**PLACES, precision="bf16").identity()["precision"] == "bf16"


def test_what_decides_no_number_is_no_part_of_a_run():
    plain = Settings(**PLACES).identity()
    assert Settings(**PLACES, quiet=True, tensorboard=True).identity() == plain
    assert Settings(**PLACES, seed=1).identity() != plain
    assert not {*PLACES} & {*plain}


def test_matrices_alone_decay_and_what_is_frozen_is_nobodys():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].requires_grad_(False)
    decayed, kept = make_optimizer(model, Recipe(9, 4, 16, 2e-3, 3, decay=0.25)).param_groups
    assert ([*decayed["params"]], decayed["weight_decay"]) == ([model[0].weight], 0.25)
    assert (len(kept["params"]), kept["weight_decay"]) == (3, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [None, 1, 30, 100, 5000])
@pytest.mark.parametrize("more", [{}, {"save_every": 1}, {"batch": 64}], ids=str)
def test_scores_take_a_tenth_of_the_time_at_most(device, steps, more):
    settings = Settings(**PLACES, device=device, steps=steps, **more)
    recipe, windows = settings.recipe, settings.scored_windows
    assert recipe.steps == steps or (steps is None and recipe.steps == {"cpu": 200, "cuda": 1000}[device])
    points = sum(recipe.is_point(step) for step in range(1, recipe.steps + 1))
    scores = 3 + points  # of the original, the start and the result, too
    passes = 3 * recipe.steps * recipe.batch  # a step is a forward of each model and a backward
    assert windows == 1 or windows * scores <= 0.1 * passes
    assert windows in (1, 256) or (windows + 1) * scores > 0.1 * passes
    assert settings.identity()["windows"] == windows
    assert settings.identity()["steps"] == recipe.steps


def test_windows_that_are_given_are_taken():
    settings = Settings(**PLACES, steps=10, windows=77)
    assert settings.scored_windows == settings.identity()["windows"] == 77
