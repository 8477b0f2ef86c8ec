"""The gallery draws every mask and counts its tiles."""

import mask_gallery
import pytest
import torch

from attnlib import CAUSAL, FULL, masks


def test_it_prints_the_counts_and_writes_the_picture(tmp_path, capsys):
    mask_gallery.main(["--tokens", "32", "--tile", "8", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "causal                        6 full    4 partial    6 empty" in text
    assert len(text.splitlines()) == len(mask_gallery.gallery(32)) + 2
    assert (tmp_path / "mask_gallery.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("mask", "counts"),
    [
        (FULL, (16, 0, 0)),
        (CAUSAL, (6, 4, 6)),
        (masks.documents(torch.arange(32)[None] // 16), (8, 0, 8)),
        (masks.documents(torch.arange(32)[None]), (0, 4, 12)),
    ],
)
def test_tiles_are_counted(mask, counts):
    assert mask_gallery.panel(mask, 32, 8).counts == counts


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--tokens", "20"], "a multiple of 16"), (["--tile", "7"], "a divisor")]
)
def test_other_sizes_are_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        mask_gallery.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_legend_explains_every_colour_of_the_picture(tmp_path, monkeypatch):
    figure, legends = pytest.importorskip("matplotlib.figure").Figure, []
    save = figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *a, **k: (legends.extend(self.legends), save(self, *a, **k))
    )
    mask_gallery.main(["--tokens", "32", "--tile", "8", "--out", str(tmp_path)])
    [legend] = legends
    pixels = pytest.importorskip("matplotlib.image").imread(tmp_path / "mask_gallery.png")[..., :3]
    shown = torch.as_tensor(pixels).flatten(0, 1)
    explained = torch.tensor([patch.get_facecolor()[:3] for patch in legend.legend_handles])
    assert len(explained) == 4
    for colour in explained:  # each covers at least a hundredth of the picture, to a rounding
        assert ((shown - colour).abs().amax(1) < 0.01).float().mean() > 0.01
