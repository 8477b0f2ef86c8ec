"""Peers beyond torch, which are not here: modules in their place that compute eagerly, called as the peers
are.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bench_helpers import place, tiny
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlib import FULL, KVLayout, sliding
from attnlib.bench import peers, speed, stored, tables
from attnlib.bench.cases import packed
from attnlib.bench.compare import FOREIGN, attempt, compare_calls
from attnlib.bench.implementations import implementation
from attnlib.bench.stored import Decoding

GQA = Decoding("gqa", 3, 4, 64, KVLayout.grouped(2, 16, dtype=torch.float32))
MLA = Decoding("mla", 3, 4, 128, KVLayout.latent(16, 8, dtype=torch.float32))
TABLES = {table.name: (fill, table) for fill, table in tables.GPU}


class Decode:
    """FlashInfer's decoding over pages: what it is planned for is kept, and computed one sequence after
    another.
    """

    def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool):
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, dim, page, *, q_data_type, kv_data_type):
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        self.pages, self.last, self.sizes = (
            indices.long().split(indptr.diff().tolist()),
            last_page_len,
            (page, kv_heads),
        )

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        assert {x.shape[1:3] for x in caches} == {self.sizes}
        keys = [
            [
                x[pages].flatten(0, 1)[: len(pages) * x.shape[1] - x.shape[1] + last].transpose(0, 1)
                for x in caches
            ]
            for pages, last in zip(self.pages, self.last.tolist(), strict=True)
        ]
        outs = [
            scaled_dot_product_attention(row[:, None], *kv, enable_gqa=True)
            for row, kv in zip(q, keys, strict=True)
        ]
        return torch.stack(outs)[:, :, 0]


class Latent:
    """FlashInfer's decoding over latents."""

    def __init__(self, workspace: Tensor):
        pass

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len,
        heads,
        ckv,
        kpe,
        page,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert qo_indptr.diff().eq(1).all()
        self.pages, self.lengths = kv_indices.long().split(kv_indptr.diff().tolist()), kv_len.tolist()
        self.scale = sm_scale

    def run(self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
        assert q_nope.is_contiguous()
        q, outs = torch.cat((q_nope, q_rope), -1), []
        for row, pages, n in zip(q, self.pages, self.lengths, strict=True):
            latent, rope = (x[pages].flatten(0, 1)[:n] for x in (latents, ropes))
            outs.append(torch.softmax(row @ torch.cat((latent, rope), -1).T * self.scale, -1) @ latent)
        return torch.stack(outs)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2), None


@pytest.fixture
def installed(monkeypatch):
    """Both peers, as far as anyone can tell."""
    modules = {
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_func": flash_attn_func},
        "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Decode},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": Latent},
    }
    for name, public in modules.items():
        module = ModuleType(name)
        vars(module).update(public)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "distributions", lambda name: [SimpleNamespace(version=f"{len(name)}.0")])
    monkeypatch.setattr(peers, "WORKSPACE", 64)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(peers, "distributions", lambda name: [])


@pytest.mark.parametrize("case", [tiny(24), tiny(24, FULL, batch=2, kv_heads=2)], ids=str)
def test_flash_attention_4_has_a_column_of_its_own(installed, case):
    [(_, row)] = speed.rows(place(), [TABLES["backward"][1]], [case], ("FA2", "FA4"))
    assert list(row.cells) == ["ours", "FA2", "FA4"]
    assert set(row.cells.values()) == {case.flops("backward") / 1e9}


@pytest.mark.parametrize("case", [tiny(24, sliding(5)), packed(7, 5)], ids=["window", "packed"])
def test_what_flash_attention_4_is_not_asked_for(installed, case):
    assert attempt(implementation, "FA4", case, place()) == "refuses"


@pytest.mark.parametrize(("case", "name"), [(GQA, "decode"), (MLA, "mla-decode")], ids=["grouped", "latent"])
def test_flashinfer_has_a_column_of_its_own(installed, case, name):
    fill, table = TABLES[name]
    others = {"peers": ("FA2", "FlashInfer")} if name == "decode" else {}
    [(_, row)] = fill(place(), [table], work=[case], **others)
    assert list(row.cells)[table.ours :] == [*others.get("peers", ())[:1], "FlashInfer"]
    assert all(value == pytest.approx(1e3 / case.calls) for value in row.cells.values())


@pytest.mark.parametrize("case", [GQA, MLA], ids=["grouped", "latent"])
def test_flashinfer_reads_pages_in_random_order(installed, monkeypatch, case):
    """Read in any other order, they are those of other sequences."""
    q, *keys = case.tensors("cpu")
    mine = {"FA2": lambda: stored.peer(place(), "FA2", case, q, keys)} if case is GQA else {}
    mine |= {"definition": lambda: stored.by_definition(q, *keys)} if case is MLA else {}
    asked = mine | {"FlashInfer": lambda: stored.peer(place(), "FlashInfer", case, q, keys)}
    assert set(compare_calls(place(), asked).values()) == {1e-3}
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda x, dim, order, pages: x.copy_(pages))
    assert set(compare_calls(place(), asked).values()) == {"agrees with nobody"}


def test_peers_that_are_not_installed_have_no_column(nothing_installed):
    assert peers.versions() == {}
    [(_, row)] = speed.rows(place(), [TABLES["forward"][1]], [tiny()], ("FA2", "FA4"))
    assert list(row.cells) == ["ours", "FA2"]
    fill, table = TABLES["mla-decode"]
    [(_, row)] = fill(place(), [table], work=[MLA])
    assert list(row.cells) == ["pages of 64", "contiguous"]


def test_the_head_says_which_peers_were_there(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    pytest.importorskip("triton")
    facts = tables.facts(place()._replace(device="cuda"), "the command")
    assert {name: facts[name] for name in peers.PACKAGES} == {
        "FA4": "flash-attn-4 12.0",
        "FlashInfer": "flashinfer-python 17.0",
    }
    monkeypatch.setattr(peers, "distributions", lambda name: [])
    assert not peers.PACKAGES.keys() & tables.facts(place()._replace(device="cuda"), "the command").keys()


def test_packages_are_looked_up_by_their_names(monkeypatch):
    monkeypatch.setattr(peers, "PACKAGES", {"here": "pytest", "not here": "no-such-package"})
    assert peers.versions() == {"here": f"pytest {pytest.__version__}"}
    assert peers.present(["SDPA", "not here", "here"]) == ["SDPA", "here"]


def test_every_table_with_peers_asks_for_them():
    asked = {
        name: fill.keywords.get("peers", ())
        for name, (fill, _) in TABLES.items()
        if hasattr(fill, "keywords")
    }
    assert {name for name, names in asked.items() if "FA4" in names} == {
        "forward",
        "backward",
        "long",
        "growing",
        "growing-training",
    }
    assert {name for name, names in asked.items() if "FlashInfer" in names} == {"decode", "mla-decode"}


def test_a_compiler_that_fails_ends_its_peer_alone(monkeypatch):
    class Error(Exception):
        pass

    def broken():
        raise Error("no kernel for this chip")

    with pytest.raises(Error):
        attempt(broken)
    for module, name in FOREIGN.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: Error}))
        assert attempt(broken) == "fails: Error: no kernel for this chip"
        monkeypatch.undo()
