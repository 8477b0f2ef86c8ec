"""The decoding tables filled on a CPU: cases, caches in random order, who is checked against whom."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from bench_helpers import place

from attnlib import CAUSAL, KVLayout, MultiHeadLatentAttention, attention, cached_attention
from attnlib.bench import decode, steps, stored, tables
from attnlib.bench.compare import Failure
from attnlib.bench.report import Line, Table, markdown

TABLES = {table.name: table for _, table in tables.GPU}
GROUPED = KVLayout.grouped(2, 16, dtype=torch.float32)
LATENT = KVLayout.latent(16, 8, dtype=torch.float32)
GQA = stored.Decoding("gqa", 3, 4, 40, GROUPED)
MLA = stored.Decoding("mla", 3, 4, 40, LATENT)
STEPS = steps.StepCase("2 x 9", 2, 9, layers=2, width=64, heads=4, kv_heads=2, dtype=torch.float32)
LAYER = steps.LatentLayer("layer", 2, 40, 32, 4, 16, rank=16, head=8, rope=8, dtype=torch.float32)
FACTS = {"command": "bench", "device": "a device"}
SEVERAL = Table("several", "Several", "us", ours=2)


def named(name):
    return (TABLES[name],)


def filled(name, case, where=None, **options):
    """The only row of a decoding table, for another case."""
    [fill] = [entry.fill for entry in tables.GPU if entry.table.name == name]
    [(_, row)] = fill(where or place(), named(name), work=[case], **options)
    return row


@pytest.fixture
def eager_compiler():
    torch._dynamo.reset()
    yield partial(torch.compile, backend="eager")
    torch._dynamo.reset()


def test_caches_against_torch():
    columns = ["contiguous", "pages of 1", "pages of 16", "pages of 64", "pages of 256"]
    row = filled("decode", GQA, peers=("FA2", "cuDNN"))
    assert row.cells == dict.fromkeys([*columns, "FA2"], pytest.approx(1e3 / GQA.calls)) | {
        "cuDNN": "refuses"
    }
    assert list(row.cells)[: TABLES["decode"].ours] == columns
    assert not TABLES["decode"].failed(row)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_peer_computes_the_same(monkeypatch, kv_heads):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = GQA._replace(layout=replace(GROUPED, heads=kv_heads))
    row = filled("decode", case, peers=("FA2", "Flex"))
    assert len(row.cells) == 7
    assert all(value == pytest.approx(5) for value in row.cells.values())


def test_a_cache_that_reads_other_pages_is_not_timed():
    def mixed_up(case, keys, page_size):
        view = stored.stored(case, keys, page_size=page_size)
        return replace(view, table=view.table.roll(1, 0)) if page_size in (1, 16) else view

    fills = {f"pages of {size}": partial(mixed_up, page_size=size) for size in (1, 16, 64)}
    row = filled("decode", GQA, peers=("FA2",), fills={"contiguous": decode.STORAGES["contiguous"], **fills})
    assert all(row.cells[name].startswith("differs from") for name in ("pages of 1", "pages of 16"))
    assert row.cells["contiguous"] == row.cells["pages of 64"] == row.cells["FA2"] == pytest.approx(5)


def test_latents_are_checked_against_the_definition(monkeypatch):
    row = filled("mla-decode", MLA)
    assert row.cells == {"pages of 64": pytest.approx(5), "contiguous": pytest.approx(5)}
    assert "| mla | 5 | 5 |" in markdown(TABLES["mla-decode"], [row], FACTS)
    monkeypatch.setattr(stored, "by_definition", lambda q, *keys: lambda: q[..., :16])
    assert set(filled("mla-decode", MLA).cells.values()) == {"agrees with nobody"}


BOTH = pytest.mark.parametrize("case", [GQA, MLA], ids=["grouped", "latent"])


@BOTH
def test_fewer_bits(case):
    row = filled("decode-quantised", case)
    assert list(row.cells) == ["fp8", "int8", "bf16"]
    assert "| 5 (1.00x) | 5 (1.00x) | 5 |" in markdown(TABLES["decode-quantised"], [row], FACTS)


@BOTH
def test_forks_of_one_prompt(case):
    assert filled("shared-prefix", case).cells == {
        "forked": pytest.approx(5),
        "stored apart": pytest.approx(5),
    }


def test_forks_share_their_pages_and_keep_their_last_token():
    case = GQA._replace(tokens=130)
    _, *keys = case.tensors("cpu")
    tables = [fill(case, keys).table.tolist() for fill in (stored.forked, stored.copied)]
    assert [len({page for row in table for page in row}) for table in tables] == [2 + 3, 3 * 3]


def test_batch_invariant_caches():
    _, *keys = GQA.tensors("cpu")
    assert [fill(GQA, keys).split_size > 0 for fill in decode.BATCHES.values()] == [True, False]
    row = filled("batch-invariant", GQA, place(backend="reference"))
    assert row.cells == {"batch-invariant": pytest.approx(5), "usual": pytest.approx(5)}


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_lie_in_random_order(page_size):
    case = GQA._replace(batch=2, tokens=512)
    q, *keys = case.tensors("cpu")
    view = stored.stored(case, keys, page_size=page_size)
    pages = view.table.flatten().tolist()
    assert sorted(pages) == list(range(len(pages)))
    gaps = [b - a for a, b in pairwise(pages)]
    assert sum(abs(gap) == 1 for gap in gaps) < len(pages) / 10
    assert 0.3 < sum(gap > 0 for gap in gaps) / len(pages) < 0.7
    torch.testing.assert_close(cached_attention(q, view, mask=CAUSAL), attention(q, *keys, mask=CAUSAL))


def test_tokens_that_do_not_fill_their_pages():
    for batch, page_size in ((100, 16), (1, 64), (3, 256)):
        case = GQA._replace(batch=batch)
        view = stored.stored(case, case.tensors("cpu")[1:], page_size=page_size)
        assert view.lengths.tolist() == [40] * batch


def test_calls_of_a_graph_read_as_many_bytes():
    assert [work.calls for work in decode.GROUPED] == [32, 32, 8, 32, 200, 8, 64]


def test_a_case_that_does_not_fit_is_a_row():
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    row = filled("decode", GQA, peers=("FA2",), fills=dict.fromkeys(decode.STORAGES, full))
    assert set(row.cells.values()) == {"OOM", "agrees with nobody"}
    assert TABLES["decode"].failed(row)


def test_steps_in_a_graph_in_eager_calls_and_compiled(eager_compiler):
    row = filled("decode-calls", STEPS, measure=partial(steps.ways, compile=eager_compiler))
    assert list(row.cells) == ["graph", "eager", "compiled"]
    assert all(value > 0 for value in row.cells.values())
    assert not TABLES["decode-calls"].failed(row)


def test_steps_that_differ_are_not_timed(eager_compiler):
    def wrong(model, **options):
        return lambda x, layers: model(x, layers) + 1

    row = filled("decode-calls", STEPS, measure=partial(steps.ways, compile=wrong))
    assert row.cells["compiled"].startswith("differs from graph")
    assert row.cells["eager"] > 0


@pytest.mark.parametrize("name", ["decode-calls", "decode-launch"])
def test_a_step_that_is_refused_says_so(name):
    row = filled(name, STEPS, place(backend="triton"))
    assert "refuses" in row.cells.values()
    assert TABLES[name].failed(row)


def test_a_decoder_steps_on_from_its_context():
    decoder = steps.Decoder(STEPS, place())
    seen = []
    with torch.no_grad():
        for _ in range(2):
            decoder.turn(lambda layers: seen.append(layers[0].positions.tolist()))
    assert seen[0] == [[9], [9]]
    assert len(seen) == 2 * steps.TURN
    assert seen[steps.TURN - 1] == [[9 + steps.TURN - 1]] * 2
    assert seen[: steps.TURN] == seen[steps.TURN :]


def test_the_cpu_time_of_append_and_attention():
    row = filled("decode-launch", STEPS, measure=partial(steps.launches, batches=2))
    assert list(row.cells) == ["both", "append", "attention"]
    assert all(value > 0 for value in row.cells.values())


def test_both_forms_of_a_latent_layer():
    assert filled("mla-layer", LAYER).cells == {"absorbed": 250, "expanded": 250}


def test_forms_that_differ_are_not_timed(monkeypatch):
    def wrong(self, q_nope, q_rope):
        return torch.cat((torch.zeros(*q_nope.shape[:-1], self.kv_lora_rank), q_rope), -1) * 3

    absorb = MultiHeadLatentAttention._absorb
    monkeypatch.setattr(
        MultiHeadLatentAttention,
        "_absorb",
        lambda self, *q: (absorb if self.backend == "torch" else wrong)(self, *q),
    )
    row = filled("mla-layer", LAYER, place(backend="reference"))
    assert row.cells["expanded"] == 250
    assert row.cells["absorbed"].startswith("differs from")


def test_several_columns_of_ours_are_held_against_the_best_other():
    row = Line("one", {"a": 2.0, "b": 4.0, "slow": 9.0, "quick": 3.0, "lost": Failure("OOM")})
    assert "| one | 2 (1.50x) | 4 (0.75x) | 9 | 3 | OOM |" in markdown(SEVERAL, [row], FACTS)
    rate = SEVERAL._replace(unit="GB/s")
    assert "| one | 2 (0.22x) | 4 (0.44x) | 9 | 3 | OOM |" in markdown(rate, [row], FACTS)
    assert "| one | 2 | 4 |" in markdown(SEVERAL, [Line("one", {"a": 2.0, "b": 4.0})], FACTS)


def test_any_column_of_ours_that_fails_counts():
    row = Line("one", {"a": 1.0, "b": Failure("OOM"), "peer": 1.0})
    assert SEVERAL.failed(row)
    assert not SEVERAL._replace(ours=1).failed(row)
    assert not SEVERAL.failed(row._replace(cells={"a": 1.0, "b": 1.0, "peer": Failure("OOM")}))
