"""The command: its trace, its table, its picture and its refusals; pages serve at least twice as many as
rows.
"""

import re

import continuous_batching
import pytest
import torch
from continuous_batching import MAX_LENGTH, check_alone, make_trace, share_prompt, sustained
from scheduler import Request
from serving import Sample
from small_models import make


def test_the_default_run_serves_at_least_twice_as_many(tmp_path, capsys, small_preset, monkeypatch):
    monkeypatch.setattr(continuous_batching, "ROUNDS", 1)  # the seconds do not matter here
    continuous_batching.main(["--out", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert "all 128 answers of both caches equal those of each request on its own" in shown
    assert (tmp_path / "new" / "continuous_batching.png").read_bytes().startswith(b"\x89PNG")
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("|")]
    names, _, *cells = [[cell.strip() for cell in row] for row in rows]
    table = {row[0]: dict(zip(names, row, strict=True)) for row in cells}
    assert list(table) == ["rows", "pages", "first fit"]
    for column in ("at once", "peak"):
        assert float(table["pages"][column]) >= 2 * float(table["rows"][column])
        assert float(table["rows"][column]) == 6
    assert 2 * int(table["pages"]["steps"]) <= int(table["rows"]["steps"])
    assert int(table["pages"]["preempted"]) > 0  # or the run would show little
    share = {
        name: {key: float(row[key].rstrip("%") or "nan") for key in row if "%" in row[key]}
        for name, row in table.items()
    }
    for name in ("rows", "pages"):
        assert share[name]["filled"] + share[name]["internal"] + share[name]["free"] == pytest.approx(
            100, abs=0.16
        )
        assert share[name]["external"] == 0
    assert share["pages"]["internal"] < 15 < 60 < share["rows"]["internal"]
    assert share["first fit"]["external"] > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--requests", "1", "--page-size", "512"], ["--rows", "1", "--page-size", "1"]]
)
def test_extreme_settings_run(tmp_path, small_preset, options):
    continuous_batching.main(["--requests", "5", "--variant", "mla", "--out", str(tmp_path), *options])


def test_what_is_sustained_is_what_runs_while_others_wait():
    samples = [Sample(live, waiting, 1, 0, 0, 0) for live, waiting in ((1, 0), (2, 1), (5, 3), (9, 0))]
    assert sustained(samples) == 3.5
    assert sustained(samples[::3]) == 5  # nobody ever waits


def test_a_shared_prompt_saves_all_but_one_copy_of_its_whole_pages():
    model = make("mqa")
    shown = share_prompt(model, requests=16, page_size=16, seed=0)
    once, used, alone = (
        int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= bytes|(?= if))", shown)
    )
    page = once // 13  # 200 tokens fill twelve pages and half of one
    assert page == 16 * sum(layout.token_bytes for layout in model.kv_layouts())
    assert "for 16 at once" in shown
    assert alone - used == (16 * 12 - 13) * page


def test_the_trace_is_skewed_bursty_and_repeats():
    trace = make_trace(128, seed=0)
    assert trace == make_trace(128, seed=0) != make_trace(128, seed=1)
    lengths = sorted(len(request.prompt) + request.new_tokens for request in trace)
    assert 8 <= lengths[0] < lengths[-1] <= MAX_LENGTH
    assert 3 * sum(lengths) / 128 < MAX_LENGTH
    assert lengths[-1] > 2.5 * lengths[64]
    arrivals = [request.arrival for request in trace]
    assert arrivals == sorted(arrivals)
    assert len(trace) > 4 * len(set(arrivals))
    assert 0 < sum(request.priority for request in trace) < 32
    assert all(0 <= token < 256 for request in trace for token in request.prompt)


@pytest.mark.parametrize(
    "change", [lambda answer: [(answer[0] + 1) % 256, *answer[1:]], lambda answer: answer[:-1]]
)
def test_another_answer_fails(change):
    model, request = make("gqa"), Request([1, 2], 2)
    likeliest = model(torch.tensor([[1, 2]]))[0, -1].argmax().item()
    second = model(torch.tensor([[1, 2, likeliest]]))[0, -1].argmax().item()
    assert check_alone(model, [request], [[likeliest, second]]) == ""
    with pytest.raises(
        SystemExit, match=r"greedy decoding differ: sequence 0 diverges|does not end where it should"
    ):
        check_alone(model, [request], [change([likeliest, second])])


@pytest.mark.parametrize(
    "wrong", [["--requests", "0"], ["--rows", "x"], ["--page-size", "3"], ["--variant", "mhla"]]
)
def test_wrong_command_lines_are_refused(wrong):
    with pytest.raises(SystemExit):
        continuous_batching.main(wrong)
