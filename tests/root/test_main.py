"""The command line as a program in a pipe, whose reader may leave."""

import os
import subprocess
import sys

import pytest

import attnlib

READER_GONE = 141
REFUSED = {
    "sizes": ("--model", "none"),
    "convert": ("/nowhere", "/nowhere/out", "--to", "gqa"),
    "finetune": ("/nowhere", "/nowhere/out", "--teacher", "/nowhere", "--text", "/nowhere"),
    "bench": ("--only", "forward"),
}


def run_unread(
    *arguments: str, stderr_too: bool = False, unbuffered: str = ""
) -> subprocess.CompletedProcess:
    """Run the program with an output that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, "-m", "attnlib", *arguments],
            stdout=write,
            stderr=write if stderr_too else subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
        )
    finally:
        os.close(write)


@pytest.mark.parametrize("unbuffered", ["1", ""], ids=["while it prints", "when it is done"])
def test_a_reader_that_leaves_ends_the_program_without_a_word(unbuffered):
    ran = run_unread("sizes", "--list", unbuffered=unbuffered)
    assert ran.stderr == ""
    assert ran.returncode == READER_GONE


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_that_nobody_reads(command):
    assert run_unread(command, *REFUSED[command], stderr_too=True).returncode == READER_GONE


def test_a_program_without_an_output_still_runs():
    closed = f"exec {sys.executable} -m attnlib sizes --list >&-"
    ran = subprocess.run(closed, shell=True, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_version():
    ran = subprocess.run([sys.executable, "-m", "attnlib", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"attnlib {attnlib.__version__}\n")


@pytest.mark.parametrize("arguments", [(), ("convert",), ("finetune",)], ids=["all", "convert", "finetune"])
def test_help_needs_no_safetensors(arguments):
    code = "import sys; sys.modules['safetensors'] = None; from attnlib.__main__ import main; main()"
    ran = subprocess.run([sys.executable, "-c", code, *arguments, "--help"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(" ".join(["usage: python -m attnlib", *arguments]))
