"""Every class of transformers that can be made small agrees with ``eager`` in every way to run it, or is
refused.
"""

from collections import Counter
from pathlib import Path

import pytest
import transformers
import walking

from attnlib.integrations import transformers as hf

hf.register()
DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"
# A line for each class of transformers, and a letter for each of walking.WAYS in order: A where it
# agrees, r where attnlib refuses, - where the walk does not know how, or the class cannot run so.
FIRST, *LINES = (Path(__file__).parent / "walked.txt").read_text().splitlines()
WALKED = dict(line.split() for line in LINES)
IS_WALKED = FIRST.startswith(f"# transformers {transformers.__version__};")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error:.*first forward never called it")
@pytest.mark.parametrize("name", walking.NAMES)
def test_a_class_agrees_or_is_refused(name):
    """And what once agreed still does, unless another version of transformers cannot run it itself."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    found = walking.walked(name)
    transformers.logging.set_verbosity(verbosity)
    wrong = {way: what for way, what in found.items() if what.startswith("wrong")}
    assert not wrong, wrong
    letters = dict(zip(walking.WAYS, WALKED.get(name, ""), strict=False))
    kept = ("agrees",) if IS_WALKED else ("agrees", "not tried")
    lost = {way: found[way] for way, x in letters.items() if x == "A" and not found[way].startswith(kept)}
    assert not lost, lost
    if all(what.startswith("not tried") for what in found.values()):
        pytest.skip(found["plain"])


def kinds() -> Counter:
    """Count the classes that agree in every way that was tried, in part, or are refused, and those not
    tried.
    """
    names = {"A": "agree", "r": "refused", "Ar": "agree in part", "": "not tried"}
    return Counter(names["".join(sorted(set(letters) - {"-"}))] for letters in WALKED.values())


def test_the_document_counts_what_was_walked():
    text = DOCUMENT.read_text()
    for kind, count in kinds().items():
        assert f"| {kind} | {count} |" in text, (kind, count)
