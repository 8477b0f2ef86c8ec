"""docs/examples.md lists every file of examples/, and its commands have options that exist."""

import re

import pytest
from source import ROOT

EXAMPLES = ROOT.parent / "examples"
PAGE = (ROOT.parent / "docs/examples.md").read_text()
FILES = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
PROGRAMS = sorted(name for name, text in FILES.items() if 'if __name__ == "__main__":' in text)
SECTIONS = dict(re.findall(r"^## (\w+\.py)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
OPTIONS = re.compile(r"(?<![\w-])--[a-z-]+")


def test_every_program_has_a_section_and_a_row():
    assert len(PROGRAMS) >= 11
    assert sorted(SECTIONS) == PROGRAMS
    assert sorted(re.findall(r"^\| \[`(\w+\.py)`\]\(#", PAGE, re.MULTILINE)) == PROGRAMS


def test_every_other_file_is_named_as_a_module():
    named = re.findall(r"^\| \[`(\w+\.py)`\]\(\.\./examples/(\w+\.py)\) \|", PAGE, re.MULTILINE)
    assert all(shown == linked for shown, linked in named)
    assert sorted(shown for shown, _ in named) == sorted({*FILES} - {*PROGRAMS})


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_section_has_the_programs_command(name):
    commands = re.findall(r"^(?:python|torchrun .*?) ?examples/(\w+\.py)(.*)$", SECTIONS[name], re.MULTILINE)
    assert commands
    for program, arguments in commands:
        assert program == name
        assert all(f'"{option}"' in FILES[name] for option in OPTIONS.findall(arguments)), arguments
