"""The decoding tables filled on a CPU: cases, caches in random order, who is checked against whom, what was asked."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from bench_helpers import place

from attnlib import CAUSAL, KVLayout, MultiHeadLatentAttention, attention, cached_attention
from attnlib.bench import decode, gpu, replays, steps, stored
from attnlib.bench.race import Failure
from attnlib.bench.report import Claim, Row, Table, markdown

TABLES = {table.name: table for group in gpu.GROUPS for table in group.tables}
GROUPED = KVLayout.grouped(2, 16, dtype=torch.float32)
LATENT = KVLayout.latent(16, 8, dtype=torch.float32)
GQA = stored.Decoding("gqa", 3, 4, 40, GROUPED)
MLA = stored.Decoding("mla", 3, 4, 40, LATENT, asked=10)
STEPS = steps.Steps("2 x 9", 2, 9, layers=2, width=64, heads=4, kv_heads=2, dtype=torch.float32)
LAYER = steps.LatentLayer("layer", 2, 40, 32, 4, 16, rank=16, nope=8, rope=8, value=8, dtype=torch.float32)
FACTS = {"command": "bench", "device": "a device"}
SEVERAL = Table("several", "Several", "us", ours=2)


def tables(*names):
    return tuple(TABLES[name] for name in names)


@pytest.fixture
def eager_compiler():
    torch._dynamo.reset()
    yield partial(torch.compile, backend="eager")
    torch._dynamo.reset()


def test_grouped_caches_race_torch_and_show_time_and_bandwidth():
    work = (GQA, GQA._replace(name="asked", asked=4))
    rows = list(decode.grouped(place(), tables("decode", "decode-bandwidth"), work, peers=("FA2", "cuDNN")))
    assert [(table.name, row.name) for table, row in rows] == [
        ("decode", "gqa"),
        ("decode-bandwidth", "gqa"),
        ("decode", "asked"),
        ("decode-bandwidth", "asked"),
    ]
    columns = ["contiguous", "pages of 1", "pages of 16", "pages of 64", "pages of 256"]
    seconds = 1e-3 / GQA.calls
    for table, row in rows:
        expected = seconds * 1e6 if table.unit == "us" else GQA.bytes / 1e9 / seconds
        assert row.cells == dict.fromkeys([*columns, "FA2"], pytest.approx(expected)) | {"cuDNN": "refuses"}
        assert list(row.cells)[: table.ours] == columns
        assert not table.failed(row)
    assert rows[0][1].claim == Claim(1, 0.9, of="contiguous")
    assert str(rows[2][1].claim) == "contiguous: 5.00 us, asked <= 4 us: **missed**"
    assert rows[1][1].claim is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_peer_computes_the_same(kv_heads):
    case = GQA._replace(layout=replace(GROUPED, heads=kv_heads))
    [(_, row)] = decode.grouped(place(), tables("decode"), [case], pages=(16,), peers=("FA2", "Flex"))
    assert all(value == pytest.approx(5) for value in row.cells.values())


def test_a_cache_that_reads_other_pages_is_not_timed(monkeypatch):
    def mixed_up(case, keys, page_size):
        view = stored.stored(case, keys, page_size)
        return replace(view, table=view.table.roll(1, 0)) if page_size in (1, 16) else view

    monkeypatch.setattr(decode, "stored", mixed_up)
    [(_, row)] = decode.grouped(place(), tables("decode"), [GQA], pages=(1, 16, 64), peers=("FA2",))
    assert all(row.cells[name].startswith("differs from") for name in ("pages of 1", "pages of 16"))
    assert row.cells["contiguous"] == row.cells["pages of 64"] == row.cells["FA2"] == pytest.approx(5)


def test_latents_are_checked_and_held_against_what_was_asked():
    rows = list(decode.latent(place(), tables("mla-decode", "mla-decode-flops"), [MLA]))
    assert [list(row.cells) for _, row in rows] == [["pages of 64", "contiguous"]] * 2
    assert rows[0][1].claim == Claim(pytest.approx(5), 10, most=True, unit=" us", of="pages of 64")
    assert rows[1][1].cells["contiguous"] == pytest.approx(MLA.flops / 1e12 / 5e-6)
    text = markdown(TABLES["mla-decode"], [rows[0][1]], FACTS)
    assert "| mla | 5 | 5 | pages of 64: 5.00 us, asked <= 10 us |" in text


@pytest.mark.parametrize("case", [GQA, MLA._replace(asked=None)], ids=["grouped", "latent"])
def test_fewer_bits_are_faster_than_bf16_by_what_was_asked(case):
    [(table, row)] = decode.fewer_bits(place(), tables("decode-quantised"), [(case, 1.6)])
    assert list(row.cells) == ["fp8", "int8", "bf16"]
    assert row.claim == Claim(1, 1.6, of="fp8")
    assert "| 5 (1.00x) | 5 (1.00x) | 5 | fp8: 1.00x, asked >= 1.6x: **missed** |" in markdown(table, [row], FACTS)


@pytest.mark.parametrize("case", [GQA, MLA._replace(asked=None)], ids=["grouped", "latent"])
def test_forks_of_one_prompt(case):
    [(_, row)] = decode.shared(place(), tables("shared-prefix"), [case], page_size=16)
    assert row.cells == {"forked": pytest.approx(5), "stored apart": pytest.approx(5)}


def test_forks_share_their_pages_and_keep_their_last_token():
    _, keys = GQA.tensors("cpu")
    tables = [fill(GQA, keys, 16).table.tolist() for fill in (stored.forked, stored.copied)]
    assert [len({page for row in table for page in row}) for table in tables] == [2 + 3, 3 * 3]


@pytest.mark.parametrize("case", [GQA, MLA._replace(asked=None)], ids=["grouped", "latent"])
def test_a_prompt_among_single_tokens(case):
    [(_, row)] = decode.mixed(place(), tables("decode-mixed"), [(case, 7)], page_size=16)
    assert row.name == f"{case.name}, a prompt of 7"
    assert row.cells == {"one call": pytest.approx(5), "two calls": pytest.approx(5)}


def test_batch_invariant_caches():
    seen = []

    def watched(case, keys, page_size, **options):
        seen.append(stored.stored(case, keys, page_size, **options).section > 0)
        return stored.stored(case, keys, page_size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "stored", watched)
        [(_, row)] = decode.invariant(place(backend="reference"), tables("batch-invariant"), [GQA], page_size=16)
    assert seen == [True, False]
    assert row.cells == {"batch-invariant": pytest.approx(5), "usual": pytest.approx(5)}


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_lie_in_random_order(page_size):
    case = GQA._replace(batch=2, tokens=512)
    q, keys = case.tensors("cpu")
    view = stored.stored(case, keys, page_size)
    pages = view.table.flatten().tolist()
    assert sorted(pages) == list(range(len(pages)))
    gaps = [b - a for a, b in pairwise(pages)]
    assert sum(abs(gap) == 1 for gap in gaps) < len(pages) / 10
    assert 0.3 < sum(gap > 0 for gap in gaps) / len(pages) < 0.7
    torch.testing.assert_close(cached_attention(q, view, mask=CAUSAL), attention(q, *keys, mask=CAUSAL))


def test_tokens_that_do_not_fill_their_pages():
    for batch, page_size in ((100, 16), (1, 64), (3, 256)):
        case = GQA._replace(batch=batch)
        view = stored.stored(case, case.tensors("cpu")[1], page_size)
        assert view.lengths.tolist() == [40] * batch


def test_bytes_and_flops():
    case = decode.GROUPED[2]
    assert case.bytes == 64 * 8192 * 2 * 8 * 128 * 2
    assert case.flops == 4 * 64 * 32 * 8192 * 128
    assert decode.LATENT[0].flops == 2 * 64 * 16 * 8192 * (576 + 512)
    assert [work.calls for work in decode.GROUPED] == [32, 32, 8, 32, 200, 8, 64]


def makers(**results):
    return {name.replace("_", " "): partial(lambda x: lambda: x, torch.tensor(x)) for name, x in results.items()}


def test_ours_do_not_outvote_the_others():
    wrong = makers(one=2.0, two=2.0, three=2.0, FA2=1.0, cuDNN=1.0)
    cells = replays.race(place(), wrong, calls=2, ours=("one", "two", "three"))
    assert cells["FA2"] == cells["cuDNN"] == 1e-3 / 2
    assert all(cells[name].startswith("differs from FA2") for name in ("one", "two", "three"))


def test_who_is_wrong_is_not_timed():
    cells = replays.race(place(), makers(ours=1.0, other=3.0, FA2=1.0, Flex=1.001), calls=1, ours=("ours", "other"))
    assert cells == {"ours": 1e-3, "other": "differs from FA2 by 2e+00", "FA2": 1e-3, "Flex": 1e-3}
    cells = replays.race(place(), makers(ours=1.0, FA2=1.0, cuDNN=4.0), calls=1, ours=("ours",))
    assert cells["cuDNN"].startswith("differs from")


def test_ours_need_somebody_to_agree_with():
    lost = {"ours": "agrees with nobody", "FA2": "agrees with nobody"}
    assert replays.race(place(), makers(ours=1.0, FA2=2.0), calls=1, ours=("ours",)) == lost
    assert replays.race(place(), makers(one=1.0, two=1.04), calls=1, bound=5e-2) == {"one": 1e-3, "two": 1e-3}


def test_a_judge_is_not_timed():
    cells = replays.race(place(), makers(ours=1.0, judge=1.0), calls=1, ours=("ours",), judges=("judge",))
    assert cells == {"ours": 1e-3}


def test_a_peer_that_cannot_be_captured_is_timed_alone_and_marked():
    def capture(call, calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    cells = replays.race(place()._replace(capture=capture), makers(ours=1.0, FA2=1.0), calls=5, ours=("ours",))
    assert cells["ours"].startswith("fails: RuntimeError: operation not permitted")
    assert cells["FA2, not captured"] == 1e-3
    assert "FA2" not in cells


def test_who_cannot_get_ready_does_not_end_the_race():
    def broken():
        raise NotImplementedError("not here")

    cells = replays.race(place(), {"ours": broken, **makers(FA2=1.0, cuDNN=1.0)}, calls=1, ours=("ours",))
    assert cells == {"ours": "refuses", "FA2": 1e-3, "cuDNN": 1e-3}


def test_a_case_that_does_not_fit_is_a_row(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decode, "stored", full)
    [(table, row)] = decode.grouped(place(), tables("decode"), [GQA], peers=("FA2",))
    assert set(row.cells.values()) == {"OOM", "agrees with nobody"}
    assert table.failed(row)


def test_steps_in_a_graph_in_eager_calls_and_compiled(eager_compiler):
    [(table, row)] = steps.calls(place(), tables("decode-calls"), [STEPS], compile=eager_compiler)
    assert list(row.cells) == ["graph", "eager", "compiled", "one replay", "its kernels"]
    assert all(value > 0 for value in row.cells.values())
    assert row.claim == Claim(1, 1.05, most=True, of="one replay over its kernels")
    assert not table.failed(row)


def test_steps_that_differ_are_not_timed(eager_compiler):
    def wrong(model, **options):
        return lambda x, layers: model(x, layers) + 1

    [(_, row)] = steps.calls(place(), tables("decode-calls"), [STEPS], compile=wrong)
    assert row.cells["compiled"].startswith("differs from graph")
    assert row.cells["eager"] > 0


def test_a_step_that_is_refused_says_so():
    where = place(backend="triton")
    for name, fill in (("decode-calls", steps.calls), ("decode-launch", steps.launch)):
        [(table, row)] = fill(where, tables(name), [STEPS])
        assert row.cells[next(iter(row.cells))] == "refuses"
        assert table.failed(row)
        assert row.claim is None


def test_a_decoder_steps_on_from_its_context():
    decoder = steps.Decoder(STEPS, place())
    seen = []
    with torch.no_grad():
        for _ in range(2):
            decoder.turn(lambda layers: seen.append(layers[0].positions.tolist()))
    assert seen[0] == [[9], [9]]
    assert len(seen) == 2 * steps.STEPS
    assert seen[steps.STEPS - 1] == [[9 + steps.STEPS - 1]] * 2
    assert seen[: steps.STEPS] == seen[steps.STEPS :]


def test_the_cpu_time_of_append_and_attention():
    [(_, row)] = steps.launch(place(), tables("decode-launch"), [STEPS], batches=2)
    assert list(row.cells) == ["both", "append", "attention"]
    assert row.claim == Claim(row.cells["both"], 40, most=True, unit=" us")


def test_both_forms_of_a_latent_layer():
    [(_, row)] = steps.forms(place(), tables("mla-layer"), [LAYER])
    assert row.cells == {"absorbed": 250, "expanded": 250}
    assert row.claim == Claim(1, 5)


def test_forms_that_differ_are_not_timed(monkeypatch):
    def wrong(self, q_nope, q_rope):
        return torch.cat((torch.zeros(*q_nope.shape[:-1], self.kv_lora_rank), q_rope), -1) * 3

    absorb = MultiHeadLatentAttention._absorb
    monkeypatch.setattr(
        MultiHeadLatentAttention, "_absorb", lambda self, *q: (absorb if self.backend == "torch" else wrong)(self, *q)
    )
    where = place(backend="reference")
    [(_, row)] = steps.forms(where, tables("mla-layer"), [LAYER])
    assert row.cells["expanded"] == 250
    assert row.cells["absorbed"].startswith("differs from")


def test_several_columns_of_ours_are_held_against_the_best_other():
    row = Row("one", {"a": 2.0, "b": 4.0, "slow": 9.0, "quick": 3.0, "lost": Failure("OOM")})
    assert "| one | 2 (1.50x) | 4 (0.75x) | 9 | 3 | OOM |" in markdown(SEVERAL, [row], FACTS)
    rate = SEVERAL._replace(unit="GB/s")
    assert "| one | 2 (0.22x) | 4 (0.44x) | 9 | 3 | OOM |" in markdown(rate, [row], FACTS)
    assert "| one | 2 | 4 |" in markdown(SEVERAL, [Row("one", {"a": 2.0, "b": 4.0})], FACTS)


def test_any_column_of_ours_that_fails_counts():
    row = Row("one", {"a": 1.0, "b": Failure("OOM"), "peer": 1.0})
    assert SEVERAL.failed(row)
    assert not SEVERAL._replace(ours=1).failed(row)
    assert not SEVERAL.failed(row._replace(cells={"a": 1.0, "b": 1.0, "peer": Failure("OOM")}))


def test_claims_compare_by_their_room():
    late, early = Claim(12.0, 10, most=True, unit=" us", of="pages of 1"), Claim(0.95, 0.9)
    assert min(early, late, key=lambda claim: claim.room) is late
    assert str(late) == "pages of 1: 12.00 us, asked <= 10 us: **missed**"
