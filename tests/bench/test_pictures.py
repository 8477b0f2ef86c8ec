"""What pictures of growing tables name and show, and how those of docs/ are drawn from its tables."""

import runpy
from pathlib import Path

import pytest
from bench_helpers import place, tiny

from attnlib.bench import plots, speed, tables
from attnlib.bench.compare import Failure
from attnlib.bench.report import Line, Table

to_hex = pytest.importorskip("matplotlib.colors").to_hex
DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
GROWING = Table("growing", "Growing", "MiB", growing=True)
ROWS = [Line("1k", {"ours": 8.0, "peer": Failure("OOM"), "must be held": 8.0}, 1024)]


@pytest.fixture
def axes(monkeypatch):
    """The axes of each figure that is written."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    found, save = [], figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *a, **k: (found.append(self.axes[0]), save(self, *a, **k))
    )
    return found


def test_a_picture_names_attnlib_and_shows_its_line_below_another(axes, tmp_path):
    plots.draw(GROWING, ROWS, tmp_path / "x.png", "attnlib on a device")
    [drawn] = axes
    assert drawn.get_title(loc="left") == "Growing\nattnlib on a device"
    ours, held = drawn.lines
    assert [line.get_label() for line in (ours, held)] == ["attnlib", "must be held"]
    assert ours.get_linewidth() > 2 * held.get_linewidth()  # to be seen on both sides of it
    assert list(ours.get_ydata()) == list(held.get_ydata()) == [8.0]


def test_a_run_names_its_device_in_the_picture(axes, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "facts", lambda *_: dict.fromkeys(("command", "triton"), "-") | FACTS)
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "growing-training"]
    fill = tables.TableEntry(lambda where, wanted: speed.rows(where, wanted, [tiny()], ("eager",)), table)
    assert tables.run(place(), [fill], tmp_path, "the command") == 0
    assert axes[0].get_title(loc="left").endswith("\nattnlib on a GPU, torch 9, a day")


FACTS = {"device": "a GPU", "torch": "torch 9", "date": "a day"}
PAGE = """
| ms | other |
|---|---:|
| 1k | 1 |

| MiB | ours | eager |
|---|---:|---:|
| 512 | 16.2 | 140 (8.65x) |
| 1k | 32 | OOM |

![attnlib on a chip](pictures/memory.png)
"""


def test_a_picture_of_the_page_is_drawn_from_the_table_above_it():
    [picture] = PAGES["pictures"](PAGE)
    assert picture.where == "attnlib on a chip"
    assert picture.table.name == "memory"
    assert picture.rows == [
        Line("512", {"ours": 16.2, "eager": 140.0}, 512),
        Line("1k", {"ours": 32.0, "eager": Failure("OOM")}, 1024),
    ]


def test_a_table_in_another_unit_is_refused():
    with pytest.raises(ValueError, match="expected a table in MiB above the picture, got ms"):
        PAGES["pictures"](PAGE.replace("MiB", "ms"))


def test_all_pictures_are_drawn_and_name_attnlib_and_the_gpu(axes, tmp_path):
    PAGES["main"](folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "growing-training.png",
        "memory.png",
        "training.png",
    }
    for drawn in axes:
        assert "attnlib" in drawn.get_title(loc="left")
        assert "NVIDIA H200" in drawn.get_title(loc="left")
    assert all(len(drawn.lines) >= 5 for drawn in axes[:2])


def test_a_library_has_one_colour_in_all_pictures(axes, tmp_path):
    PAGES["main"](folder=tmp_path)
    found = {}
    for drawn in axes:
        for handle, label in zip(*drawn.get_legend_handles_labels(), strict=True):
            patch = handle.patches[0] if hasattr(handle, "patches") else None
            colour = to_hex(patch.get_facecolor() if patch else handle.get_color())
            found.setdefault(label.partition(" (")[0], set()).add(colour)
    assert {"attnlib", "cuDNN", "FA4", "FA2", "Flex", "eager"} <= found.keys()
    assert all(len(colours) == 1 for colours in found.values()), found
    assert len(set.union(*found.values())) == len(found)


def test_bars_show_each_pass_of_the_table_above_them(monkeypatch, tmp_path):
    drawn = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **k: drawn.extend(self.axes))
    PAGES["bars"](BARS, tmp_path / "x.png")
    heights = [[[bar.get_height() for bar in group] for group in axes.containers] for axes in drawn]
    assert heights == [[[7.0, 5.0], [6.0, 4.0]], [[3.0, 2.0], [2.5, 1.0]]]
    assert drawn[1].get_xticklabels()[1].get_text() == "GQA 32/8 d128\ncausal 4k"


BARS = """
| TFLOP/s | forward | FA4 | backward | FA4 |
|---|---:|---:|---:|---:|
| d128 full 8k | 7 | 6 (1.17x) | 3 | 2.5 (1.20x) |
| GQA 32/8 d128 causal 4k | 5 | 4 (1.25x) | 2 | 1 (2.00x) |

![attnlib on a chip](pictures/training.png)
![attnlib on a chip](pictures/memory.png)
"""


def test_memory_has_ticks_that_people_read(axes, tmp_path):
    rows = [Line(str(n), {"ours": mib, "cuDNN": mib}, n) for n, mib in ((1024, 300.0), (4096, 5000.0))]
    plots.draw(GROWING, rows, tmp_path / "x.png", "attnlib on a device")
    low, high = axes[0].get_ylim()
    ticks = zip(axes[0].get_yticks(), axes[0].get_yticklabels(), strict=True)
    texts = [label.get_text() for at, label in ticks if low <= at <= high]
    assert texts == ["512 MiB", "1 GiB", "2 GiB", "4 GiB"]
