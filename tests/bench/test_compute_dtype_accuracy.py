"""The table of what a forward in e4m3 costs."""

from tests.bench import compute_dtype_accuracy as accuracy


def test_errors_are_those_of_e4m3():
    """Of which the output has more than the gradients, and bf16 far less."""
    (out, out_bf16), *gradients = accuracy.errors(64, 256, accuracy.normal, "cpu")
    assert 3e-2 < out < 5e-2
    assert out_bf16 < out / 10
    assert all(bf16 < e4m3 < out for e4m3, bf16 in gradients)


def test_a_rotation_saves_the_gradients_of_outliers():
    plain, rotated = (
        accuracy.errors(64, 1024, accuracy.outliers, "cpu", turns=turns) for turns in (False, True)
    )
    assert all(y < x for (x, _), (y, _) in zip(plain, rotated, strict=True))
    assert rotated[3][0] < plain[3][0] / 2


def test_the_table(monkeypatch):
    monkeypatch.setattr(accuracy, "TOKENS", (16,))
    lines = list(accuracy.rows("cpu"))
    assert len(lines) == 2 + 6
    assert lines[2].startswith("| d64, normal | 16 | ")
