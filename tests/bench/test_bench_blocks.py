"""Whole blocks by the attention of several libraries, on a CPU."""

from argparse import ArgumentParser

import pytest
import torch
from bench_helpers import place

from attnlib.bench import blocks, tables
from attnlib.bench.blocks import Block, BlockCase, Peer, decoding, training
from attnlib.bench.command import _tables, add_arguments
from attnlib.bench.compare import Failure
from attnlib.bench.plots import draw_bars
from attnlib.bench.report import Line

SIZES = {"width": 64, "hidden": 96, "heads": 4, "head": 16, "dtype": torch.float32}
GROUPED = BlockCase("grouped", 2, 40, 3, kv_heads=2, **SIZES)
LATENT = BlockCase("latent", 2, 40, 3, latent=(24, 32), rope=8, **SIZES)
CASES = pytest.mark.parametrize("case", [GROUPED, LATENT], ids=lambda case: case.name)
TIMED = {"ours": 80.0, "SDPA": 80.0}  # 80 tokens in a millisecond


@CASES
def test_attention_of_others_gives_the_same_block(case):
    block = Block(case, place())
    assert training(place(), case, block) == {blocks.SPEED: TIMED, blocks.MEMORY: {"ours": 1.0, "SDPA": 1.0}}
    per_second = case.decoding * blocks.CALLS
    assert decoding(place(), case, block) == {blocks.SPEED: dict.fromkeys(TIMED, per_second)}


@CASES
@pytest.mark.parametrize("measure", [training, decoding])
def test_attention_that_differs_is_not_timed(case, measure, monkeypatch):
    answer = Peer.answer
    monkeypatch.setattr(Peer, "answer", lambda *given: (answer(*given)[0] * 1.5, None))
    found = measure(place(), case, Block(case, place()))[blocks.SPEED]
    assert set(found.values()) == {"agrees with nobody"}


def test_rows_go_to_the_table_of_their_unit():
    given = [entry.table for entry in tables.BLOCKS_GPU]
    found = list(blocks.rows(place(), given, [GROUPED]))
    training, decoding = "grouped, training", "grouped, decoding"
    named = [(table.name, row.name) for table, row in found]
    assert named == [("blocks", training), ("blocks-memory", training), ("blocks", decoding)]
    assert found[0] == (given[0], Line(training, TIMED))


def test_the_command_fills_them_alone():
    parser = ArgumentParser()
    add_arguments(parser)
    assert _tables(parser.parse_args(["--blocks"])) == tables.BLOCKS_CPU
    assert _tables(parser.parse_args(["--blocks", "--gpu"])) == tables.BLOCKS_GPU


def test_the_picture_has_a_bar_for_each_number(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [Line("a", {"ours": 3.0, "SDPA": 1.5}), Line("b", {"ours": 2.0, "SDPA": Failure("refuses")})]
    path = tmp_path / "blocks.png"
    draw_bars(tables.BLOCKS_CPU[0].table, rows, path, "here")
    assert path.read_bytes().startswith(b"\x89PNG")
