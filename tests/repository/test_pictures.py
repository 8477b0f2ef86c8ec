"""The pictures of a call and of a cache show classes that exist, as their script draws them."""

import importlib
import runpy

import pytest
from source import ROOT

PICTURES = ROOT.parent / "docs/pictures"
DRAWN = runpy.run_path(str(PICTURES / "structure.py"))
BOXES = (*DRAWN["CALL"], *DRAWN["CACHE"])


@pytest.mark.parametrize("name", DRAWN["PICTURES"])
def test_a_picture_is_what_its_script_draws(name):
    assert (PICTURES / name).read_text() == DRAWN["PICTURES"][name]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: box.name)
def test_a_box_names_an_object_of_its_file(box):
    module = importlib.import_module("attnlib." + box.file.removesuffix(".py").replace("/", "."))
    assert getattr(module, box.name).__module__ == module.__name__


@pytest.mark.parametrize("picture", ["CALL", "CACHE"])
def test_every_box_has_an_arrow(picture):
    ends = {name for arrow in DRAWN[f"{picture}_ARROWS"] for name in (arrow.start, arrow.stop)}
    assert ends == {box.name for box in DRAWN[picture]}
