"""The table of families in docs/transformers.md lists every family, once."""

import re
from collections import Counter
from pathlib import Path

from attnlib.integrations.transformers.families import FAMILIES, REFUSED
from attnlib.models.families import STORED

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
ROWS = re.findall(r"^\| (.+?) \|.*\| (.+?) \|$", PAGE.split("## Families")[1].split("\n## ")[0], re.MULTILINE)
NAMES = {name for name, _ in FAMILIES} | REFUSED.keys()


def test_every_family_is_in_one_row():
    found = Counter(word for families, _ in ROWS for word in re.findall(r"\w+", families) if word in NAMES)
    assert found == dict.fromkeys(NAMES, 1)


def test_the_last_column_says_what_is_converted():
    """Rows with "yes" hold all families that checkpoints are converted of, and other rows none."""
    rows = [(words, answer) for words, answer in ROWS if words not in ("families", "---")]
    answers = {name: answer for words, answer in rows for name in re.findall(r"\w+", words) if name in NAMES}
    converted = {name for name, answer in answers.items() if answer.startswith("yes")}
    assert converted == {name for name, _ in FAMILIES} & STORED.keys() - {"bert"}
    assert {answer for name, answer in answers.items() if name not in converted} == {"no"}
