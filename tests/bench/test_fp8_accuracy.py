"""The table of what fp8 inputs cost."""

from tests.bench import fp8_accuracy


def test_a_rotation_spares_what_outliers_cost(monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "QUERIES", 256)
    bf16, fp8, rotated = fp8_accuracy.errors(128, fp8_accuracy.outliers, "cpu")
    assert bf16 < rotated < fp8 / 2
    bf16, fp8, rotated = fp8_accuracy.errors(64, fp8_accuracy.normal, "cpu")
    assert 0.8 < rotated / fp8 < 1.2


def test_the_table(monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "QUERIES", 4)
    monkeypatch.setattr(fp8_accuracy, "KEYS", 16)
    lines = list(fp8_accuracy.rows("cpu"))
    assert len(lines) == 2 + 6
    assert lines[2].startswith("| d64, normal | torch | ")
