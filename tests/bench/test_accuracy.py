"""The table of what a byte a value costs."""

import torch

from attnlib import KVLayout
from tests.bench import accuracy


def test_errors_are_those_of_the_formats(monkeypatch):
    """fp32 has none; int8 a step of 1/127 of the largest value; fp8 three bits of each."""
    monkeypatch.setattr(accuracy, "TOKENS", 256)
    monkeypatch.setattr(accuracy, "HEADS", 4)
    plain, int8, fp8 = (
        accuracy.error(KVLayout.grouped(1, 32, storage_dtype=store), accuracy.normal)
        for store in (None, torch.int8, torch.float8_e4m3fn)
    )
    assert plain < 1e-6
    assert 1e-3 < int8 < 1.5e-2 < fp8 < 6e-2
    assert accuracy.error(KVLayout.grouped(1, 32, storage_dtype=torch.int8), accuracy.outliers) > int8


def test_the_table(monkeypatch):
    monkeypatch.setattr(accuracy, "TOKENS", 32)
    monkeypatch.setattr(accuracy, "HEADS", 1)
    lines = list(accuracy.rows())
    assert lines[0] == "| relative error | bytes a token | normal | outliers | heavy |"
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["512", "264", "264", "1152", "644", "644"]
