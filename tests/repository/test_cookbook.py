"""Every recipe of the cookbook runs by itself, is short, prints the same twice, and is in the index."""

import contextlib
import io
import re
import sys
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

PAGES = Path(__file__).parents[2] / "docs/cookbook"
NUMBERS = count()
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Recipe(NamedTuple):
    page: str
    heading: str
    before: str  # what is said before the code
    codes: list[str]


def recipes_of(path: Path) -> list[Recipe]:
    text = path.read_text()
    heads = [*re.finditer(r"^## (.+)\n", FENCE.sub(lambda found: " " * len(found[0]), text), re.MULTILINE)]
    ends = [found.start() for found in heads[1:]] + [len(text)]
    sections = [(found[1], text[found.end() : end]) for found, end in zip(heads, ends, strict=True)]
    return [Recipe(path.name, name, body.partition("```")[0], FENCE.findall(body)) for name, body in sections]


RECIPES = [
    recipe for path in sorted(PAGES.glob("*.md")) if path.name != "README.md" for recipe in recipes_of(path)
]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def printed(recipe: Recipe) -> str:
    torch.manual_seed(0)
    name = f"recipe_{next(NUMBERS)}"  # by which torch.compile imports it, and keeps it
    module = sys.modules[name] = ModuleType(name)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(recipe.codes[0], f"{recipe.page}: {recipe.heading}", "exec"), module.__dict__)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice on products of fp32
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # which PEFT still asks for
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by Dynamo
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.page}#{anchor(recipe.heading)}")
def test_a_recipe_runs_and_says_the_same_twice(recipe):
    assert printed(recipe) == printed(recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.page}#{anchor(recipe.heading)}")
def test_a_recipe_is_short_introduced_and_checks_something(recipe):
    (code,) = recipe.codes
    assert len(code.splitlines()) <= 40
    assert max(map(len, code.splitlines())) <= 88
    assert "assert" in code
    assert 1 <= len(re.findall(r"[.?!:](?=\s|$)", recipe.before)) <= 4
    imported = re.findall(r"^(?:from|import) (attnlib[\w.]*)", code, re.MULTILINE)
    public = {
        f"attnlib{x}"
        for x in ("", ".__main__", ".packing", ".sizes", ".convert", ".compat", ".integrations", ".qk_clip")
    }
    assert imported
    assert {*imported} <= public


def test_the_index_names_every_recipe_once_and_in_order():
    index = (PAGES / "README.md").read_text()
    linked = re.findall(r"^- \[(.+?)\]\((\w+\.md)#(.+?)\): .+$", index, re.MULTILINE)
    pages = re.findall(r"^## \[.+\]\((\w+\.md)\)$", index, re.MULTILINE)
    recipes = [recipe for page in pages for recipe in RECIPES if recipe.page == page]
    assert len(RECIPES) == len(recipes) >= 17
    assert linked == [(recipe.heading, recipe.page, anchor(recipe.heading)) for recipe in recipes]


def test_the_readme_counts_the_recipes():
    text = (PAGES.parents[1] / "README.md").read_text()
    for number in re.findall(r"(\d+) (?:more )?recipes", text):
        assert int(number) == len(RECIPES)


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES.glob("*.md"):
        for path, at in re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", FENCE.sub("", page.read_text())):
            target = page.parent / path if path else page
            assert target.is_file(), f"{page.name}: no {path}"
            assert not at or at in [anchor(recipe.heading) for recipe in recipes_of(target)], (
                f"{page.name}: no #{at}"
            )


def test_every_block_of_the_pages_is_a_recipe():
    for page in PAGES.glob("*.md"):
        assert len(FENCE.findall(page.read_text())) == sum(recipe.page == page.name for recipe in RECIPES)
        assert all(
            here != there for here, there in pairwise(sorted(anchor(x.heading) for x in recipes_of(page)))
        )
