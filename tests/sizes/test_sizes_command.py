"""The command as a user runs it: table, CSV, PNG, list, and what it refuses."""

import csv
import re
import subprocess
import sys
from dataclasses import astuple, fields
from pathlib import Path

import pytest
from torch import float8_e4m3fn

from attnlib.__main__ import main
from attnlib.sizes import CHIPS, MODELS, Row, Setting, command, model, rows, variants
from attnlib.sizes.files import write_csv

PNG = b"\x89PNG\r\n\x1a\n"


def lines_of(text, title):
    """The lines of one section of the table, by their first cells."""
    [section] = [section for section in text.split("\n\n") if section.startswith(title)]
    return {line.split("  ")[0]: line.split("  ", 1)[1].split("  ") for line in section.splitlines()[1:]}


def cells(text, title):
    """The cells of a section, by the names of the variants without the mark of the model itself."""
    return {
        name.removesuffix(" *"): [cell.strip() for cell in line if cell.strip()]
        for name, line in lines_of(text, title).items()
    }


def test_llama_2_7b_on_a_terminal():
    command = [sys.executable, "-m", "attnlib", "sizes", "--model", "llama-2-7b"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    kib = {name: line[1] for name, line in cells(ran.stdout, "attention in all layers").items()}
    assert kib == {
        "variant": "KiB/token",
        "MHA": "512",
        "GQA-8": "128",
        "MQA": "16",
        "MLA 512+64": "36",
        "MLA 512": "32",
    }
    assert cells(ran.stdout, "cache size")["MHA"][:3] == ["2 GiB", "16 GiB", "128 GiB"]
    assert max(map(len, ran.stdout.splitlines())) <= 120


def test_the_example_in_the_docs_is_what_is_printed(capsys):
    text = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text()
    [(command, shown)] = re.findall(r"`python -m attnlib (sizes .*)`:\n```\n(.*?)```", text, re.DOTALL)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown


def test_the_table_says_what_the_rows_say(capsys):
    options = ["--context", "1600,4k", "--batch", "3", "--store", "fp8", "--chip", "h100", "--memory", "16"]
    assert main(["sizes", "--model", "gpt-oss-20b", *options, "--weights", "12.5"]) == 0
    text = capsys.readouterr().out
    setting = {"contexts": (1600, 4096), "batches": (3,), "storage_dtype": float8_e4m3fn, "memory": 2**34}
    setting["weights"] = 25 * 2**29
    expected = rows(variants(model("gpt-oss-20b")), Setting(**setting, chip=CHIPS[1]))
    reads, bounds, fits = (cells(text, title) for title in ("bytes read", "bound", "limits"))
    assert reads["variant"] == ["1,600 x 3", "4K x 3"]
    for small, large in zip(expected[::2], expected[1::2], strict=True):
        assert bounds[small.variant][0].split() == [small.bound, f"{small.intensity:.1f}"]
        numbers = (small.longest_context, small.largest_batch, large.largest_batch)
        assert fits[small.variant] == [f"{number:,}" for number in numbers]
    assert "float8_e4m3fn" in text
    assert "16 GiB - 12.5 GiB (weights, as given) = 3.5 GiB for the cache" in text


def test_a_shape_of_ones_own_on_two_ranks(capsys):
    sizes = [
        "--hidden-size",
        "64",
        "--num-heads",
        "16",
        "--num-kv-heads",
        "4",
        "--head-dim",
        "8",
        "--layers",
        "3",
    ]
    more = ["--window", "32", "--kv-lora-rank", "24", "--qk-rope-head-dim", "0", "--tensor-parallel", "2"]
    assert main(["sizes", *sizes, *more, "--dtype", "fp32"]) == 0
    text = capsys.readouterr().out
    kib = {name: line[1:] for name, line in cells(text, "attention in all layers").items()}
    assert kib.pop("variant") == ["KiB/token", "KiB/token, all ranks"]
    per_head = 3 * 2 * 8 * 4 / 1024
    expected = {"GQA-4": (2, 4), "MHA": (8, 16), "GQA-8": (4, 8), "MQA": (1, 2)}
    latent = 3 * 24 * 4 / 1024
    numbers = {kind: [n * per_head for n in heads] for kind, heads in expected.items()} | {
        "MLA 24": [latent, 2 * latent]
    }
    assert {kind: [float(cell) for cell in line] for kind, line in kib.items()} == numbers
    assert cells(text, "limits")["GQA-4"][:3] == ["any"] * 3


def test_the_csv_reads_back_as_the_rows(tmp_path, capsys):
    path = tmp_path / "sizes.csv"
    path.write_text("what was there before")
    assert main(["sizes", "--model", "mistral-7b", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    assert head == [*(field.name for field in fields(Row)), "is_model"]
    assert {line[0]: line.pop() for line in lines} == {
        "MHA": "False",
        "GQA-8": "True",
        "MQA": "False",
        "MLA 512+64": "False",
        "MLA 512": "False",
    }
    read = [tuple(cell if not cell.isdigit() else int(cell) for cell in line) for line in lines]
    expected = rows(variants(model("mistral-7b")), Setting())
    assert read == [tuple("" if cell is None else cell for cell in astuple(row)) for row in expected]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "expected"), [([], 1), (["--batch", "1,2k"], 2048), (["--batch", "4"], 4)]
)
def test_the_picture_is_of_one_sequence_unless_a_batch_is_asked(options, expected, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(command, "draw", lambda *_, batch: drawn.append(batch))
    assert main(["sizes", "--model", "gpt-2", "--png", "x.png", *options]) == 0
    assert drawn == [expected]


@pytest.mark.parametrize("context", ["128k", "128K", "131072", "128k,131072"])
def test_sizes_take_the_suffixes_that_the_table_prints(context, capsys):
    assert main(["sizes", "--model", "llama-3-70b", "--context", context, "--batch", "1"]) == 0
    assert cells(capsys.readouterr().out, "cache size")["variant"] == ["128K x 1"]


def test_a_list_of_sizes_mixes_suffixes(capsys):
    options = ["--context", "8k,100,1M", "--page-size", "1k", "--window", "2K"]
    assert main(["sizes", "--model", "gpt-2", "--batch", "1", *options]) == 0
    text = capsys.readouterr().out
    assert cells(text, "cache size")["variant"] == ["8K x 1", "100 x 1", "1M x 1"]
    assert "pages of 1,024 tokens" in text


def test_the_picture_is_one(tmp_path, capsys):
    path = tmp_path / "sizes.png"
    assert main(["sizes", "--model", "gemma-3-12b", "--batch", "1", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_of_next_to_nothing(tmp_path):
    path = tmp_path / "sizes.png"
    assert main(["sizes", "--model", "gpt-2", "--context", "1", "--memory", "0", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(PNG)


def test_the_list_has_every_name_and_source(capsys):
    assert main(["sizes", "--list"]) == 0
    text = capsys.readouterr().out
    for entry in (*MODELS, *CHIPS):
        assert any(
            line.startswith(entry.name + " ") and line.endswith(entry.source) for line in text.splitlines()
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model: expected a name (--list), or --hidden-size, --num-heads and --layers, got neither"),
        (["--model", "lama-2-7b"], "did you mean 'llama-2-7b'?"),
        (
            ["--model", "gpt-2", "--layers", "3"],
            "--model: expected a name or sizes, got both 'gpt-2' and layers",
        ),
        (["--hidden-size", "8", "--num-heads", "2"], "got neither"),
        (["--hidden-size", "8", "--num-heads", "3", "--layers", "1"], "--num-heads: expected a divisor"),
        (["--hidden-size", "8", "--num-heads", "0", "--layers", "1"], "--num-heads: expected a divisor"),
        (
            ["--hidden-size", "8", "--num-heads", "2", "--layers", "0"],
            "layers: expected at least 1, got none",
        ),
        (["--model", "gpt-2", "--chip", "h20"], "did you mean 'h200'?"),
        (["--model", "gpt-2", "--chip", "A100"], "did you mean 'a100-80gb'?"),
        (["--model", "gpt-2", "--chip", "MI300X"], "did you mean 'mi300x'?"),
        (["--model", "gpt-2", "--context", "0"], "contexts: expected sizes of at least 1"),
        (["--model", "gpt-2", "--page-size", "0"], "page_size: expected at least 1 token, got 0"),
        (["--model", "gpt-2", "--window", "0"], "window: expected at least 1, got 0"),
        (["--model", "gpt-2", "--tensor-parallel", "7"], "ranks: expected a divisor of num_heads=12, got 7"),
    ],
)
def test_what_cannot_be_answered_is_said_on_one_line(options, message, capsys):
    assert main(["sizes", *options]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert error.startswith("python -m attnlib sizes: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "message"),
    [(".", "expected a file to write, got a folder"), ("nowhere/sizes.csv", "No such file or directory")],
)
def test_a_file_that_cannot_be_written_is_said_below_the_table(file, message, capsys):
    assert main(["sizes", "--model", "gpt-2", "--csv", file]) == 2
    out, error = capsys.readouterr()
    assert "limits of the memory" in out
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--context", "many"],
        ["--context", "k"],
        ["--context", "8k,"],
        ["--context", "1.5k"],
        ["--batch", ""],
        ["--dtype", "int4"],
        ["--frobnicate"],
        ["--memory", "inf"],
        ["--weights", "-1"],
    ],
)
def test_bad_options_end_with_usage(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sizes", "--model", "gpt-2", *options])
    assert ended.value.code == 2
    assert "usage: python -m attnlib" in capsys.readouterr().err


def test_without_matplotlib_only_the_picture_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["sizes", "--model", "gpt-2"]) == 0
    expected = capsys.readouterr().out
    assert main(["sizes", "--model", "gpt-2", "--png", str(tmp_path / "x.png")]) == 2
    out, error = capsys.readouterr()
    assert out == expected
    assert "pip install 'attnlib[demo]'" in error
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    with pytest.raises(AttributeError):
        write_csv(model("gpt-2"), [None], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
