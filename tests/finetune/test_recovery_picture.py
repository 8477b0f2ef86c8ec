"""The picture of a recovery: its axis is that of what comes after the start, and a start beyond it is written
down.
"""

import pytest
from matplotlib.figure import Figure

from attnlib.finetune.picture import draw, draw_sparse
from attnlib.internal.plots import COLOURS


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws curves and gives the axes."""
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *x, **y: (figures.append(self), savefig(self, *x, **y))
    )

    def axes_of(curves, line=2.0):
        draw(curves, ("the original", line), "title", "bits", tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1].axes[0]

    return axes_of


def test_a_start_far_above_the_rest_does_not_flatten_it(drawn):
    axes = drawn({"poor": [(0, 9.0), (5, 2.6), (10, 2.3)], "good": [(0, 2.5), (5, 2.3), (10, 2.2)]})
    assert axes.get_ylim() == pytest.approx((2.0 - 0.15 * 0.6, 2.6 + 0.15 * 0.6))
    assert [text.get_text() for text in axes.texts] == ["9.00 ↑"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "poor: 9.000 to 2.300",
        "good: 2.500 to 2.200",
        "the original: 2.000",
    ]


def test_starts_beyond_the_axis_stand_below_each_other_in_their_colours(drawn):
    axes = drawn({name: [(0, 5.0 + n), (1, 2.1)] for n, name in enumerate("abc")})
    assert [text.get_text() for text in axes.texts] == ["7.00 ↑", "6.00 ↑", "5.00 ↑"]
    assert [text.get_color() for text in axes.texts] == [*reversed(COLOURS[:3])]
    heights = [text.xyann[1] for text in axes.texts]
    assert heights == sorted(heights, reverse=True)
    assert max(heights) < 1


def test_many_curves_and_short_ones_are_all_drawn(drawn):
    axes = drawn({str(n): [(0, 2.0)] for n in range(len(COLOURS) + 2)})
    assert len(axes.lines) == len(COLOURS) + 3
    assert axes.get_ylim()[0] < 2 < axes.get_ylim()[1]


def test_a_choice_of_keys_is_drawn_beside_the_losses(tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *x, **y: (figures.append(self), savefig(self, *x, **y))
    )
    losses, recalls = [(0, 4.0), (5, 2.2), (10, 2.1)], [(0, 0.4), (5, 0.9), (10, 0.95)]
    lines = {"the original": 2.0, "a window": 2.3}
    draw_sparse("student", losses, recalls, lines, 0.7, 6, tmp_path / "picture.png")
    left, right = figures[-1].axes
    assert [tuple(x.get_ydata()) for x in left.lines[:3]] == [(4.0, 2.2, 2.1), (2.0, 2.0), (2.3, 2.3)]
    assert [tuple(x.get_ydata()) for x in right.lines[:3]] == [(0.4, 0.9, 0.95), (1, 1), (0.7, 0.7)]
    assert all(axes.lines[3].get_xdata()[0] == 6 for axes in (left, right))
    assert left.get_ylim()[0] < 2.0 < 2.3 < left.get_ylim()[1] < 4.0
