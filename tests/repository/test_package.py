"""What is shipped: the files of both archives, what they need, one version, and a library that runs without
Triton.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import attnlib

ROOT = Path(__file__).parents[2]
VERSION = attnlib.__version__
SHIPPED = ("attnlib", "tests", "docs", "examples")
BESIDE = {
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "Makefile",
    "pyproject.toml",
}
MADE = {".ci", ".gitignore", "PKG-INFO"}  # .ci pins what `make test` installs; the others hatchling adds
WITHOUT_TRITON = """
import re, sys
sys.modules["triton"] = None  # importing it raises ImportError
for example in re.findall(r"```python\\n(.*?)```", open(sys.argv[1]).read(), re.DOTALL):
    exec(example)
"""


def files_of(folder: str) -> set[str]:
    """The files that a change of this folder would commit."""
    found = (
        path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The folder of an sdist and a wheel of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(archives):
    with zipfile.ZipFile(archives / f"attnlib-{VERSION}-py3-none-any.whl") as file:
        yield file


def test_a_wheel_is_the_package_alone(wheel):
    package = {name for name in wheel.namelist() if not name.startswith(f"attnlib-{VERSION}.dist-info/")}
    assert package == files_of("attnlib")
    beside = {name for name in package if not name.endswith(".py")}
    sample = {name for name in beside if name.startswith("attnlib/convert/text/sample_texts/")}
    assert beside - sample == {"attnlib/py.typed"}
    assert sum(wheel.getinfo(name).file_size for name in sample) < 10**6


def test_what_a_wheel_says_of_itself(wheel):
    said = {
        name: wheel.read(f"attnlib-{VERSION}.dist-info/{name}").decode()
        for name in ("METADATA", "entry_points.txt")
    }
    lines = said["METADATA"].split("\n\n")[0].splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    assert f"Version: {VERSION}" in lines
    assert {line.split(">")[0] for line in needed if "extra ==" not in line} == {
        "einops",
        "safetensors",
        "torch",
    }
    assert any(line.startswith("triton>") and "extra == 'triton'" in line for line in needed)
    assert "attnlib = attnlib.__main__:main" in said["entry_points.txt"]


def test_an_sdist_is_what_tests_and_readers_need(archives):
    with tarfile.open(archives / f"attnlib-{VERSION}.tar.gz") as file:
        names = {name.removeprefix(f"attnlib-{VERSION}/") for name in file.getnames()}
    assert {name.split("/")[0] for name in names} == {*SHIPPED, *BESIDE, *MADE}
    assert {name for name in names if name.startswith(".ci/")} == files_of(".ci")
    for folder in SHIPPED:
        assert {name for name in names if name.startswith(f"{folder}/")} == files_of(folder)


def test_papers_that_cite_it_name_this_version():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readmes_first_examples_run_without_triton():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_TRITON, "README.md"]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "bytes per token" in ran.stdout
