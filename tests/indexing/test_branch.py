"""The weights of an index branch: names, dtypes, what it refuses, and whom a loss reaches."""

import pytest
import torch
from index_cases import HIDDEN, INDEXERS, RANK, ROTATED, WIDTH, Family

from attnlib import Indexer, Rope
from attnlib.indexing import IndexBranch
from attnlib.scaling import YaRNScaling


def inputs(t: int = 9, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, t, HIDDEN, dtype=dtype), torch.randn(2, t, RANK, dtype=dtype)


@pytest.mark.parametrize("name", INDEXERS)
def test_shapes_and_gradients(name):
    """The loss of scores reaches every parameter, and neither x nor the latent."""
    family, (x, latent) = Family.of(name), inputs()
    x.requires_grad_(), latent.requires_grad_()
    index = family.tensors(x, latent)
    assert index.queries.shape == (2, 9, 4, WIDTH)
    rope = family.branch.indexer.rope
    angles = None if rope is None else rope.angles(torch.arange(9))
    assert torch.equal(family.branch.keys(x, angles), index.keys)
    assert index.keys.shape == (2, 9, WIDTH)
    assert (index.weights is None) != family.branch.indexer.weighted
    keys = index.keys
    if family.branch.indexer.norm_after_pool:
        keys = family.branch.finish(keys, torch.arange(9))
    total = (index.queries * keys[:, :, None]).sum(-1)
    (total if index.weights is None else total * index.weights).square().sum().backward()
    assert x.grad is latent.grad is None
    assert all(p.grad.abs().sum() > 0 for p in family.branch.parameters())


@pytest.mark.parametrize("name", INDEXERS)
def test_packed_tokens_are_those_of_a_batch(name):
    family, (x, latent) = Family.of(name), inputs()
    indexer, positions = family.branch.indexer, torch.arange(9)
    angles = None if indexer.rope is None else indexer.rope.angles(positions)
    given = latent[0] if indexer.source == "latent" else None
    packed = family.branch(x[0], given, angles=angles, positions=positions)
    for ours, expected in zip(packed, family.tensors(x, latent), strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected[0])


@pytest.mark.parametrize("name", INDEXERS)
def test_queries_and_keys_have_one_dtype_under_autocast(name):
    """Norms compute in fp32 there."""
    family, (x, latent) = Family.of(name), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        index = family.tensors(x, latent)
        keys = family.branch.finish(index.keys, torch.arange(9))
    assert index.queries.dtype == index.keys.dtype == keys.dtype == torch.bfloat16
    assert index.weights is None or index.weights.dtype == torch.float32


def test_hy_keeps_its_norm_and_weights_in_fp32():
    branch = Family.of("hy_v4", torch.bfloat16).branch
    x, latent = inputs(dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in branch.named_parameters()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"k_norm.weight", "k_norm.bias", "weights_proj.weight"}
    index = branch(x, latent, angles=Rope(ROTATED).angles(torch.arange(9)))
    assert [y.dtype for y in index] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_rope_on_the_last_channels():
    indexer = Indexer(2, WIDTH, rope=Rope(ROTATED), rope_place="last")
    branch, (x, _) = IndexBranch(indexer, HIDDEN), inputs()
    still = indexer.rope.angles(torch.zeros(9, dtype=torch.int64))
    moved, unmoved = branch(x, angles=indexer.rope.angles(torch.arange(9))), branch(x, angles=still)
    for ours, expected in zip(moved[:2], unmoved[:2], strict=True):
        differs = (ours != expected).flatten(0, -2).any(0)
        assert differs.tolist() == [False] * (WIDTH - ROTATED) + [True] * ROTATED


@pytest.mark.parametrize("place", ["first", "last"])
def test_yarn_multiplies_rotated_products(place):
    """transformers multiplies the rotated channels of queries and of keys."""
    rope = Rope(ROTATED, scaling=YaRNScaling(4.0, 64))
    branch = IndexBranch(Indexer(2, WIDTH, rope=rope, rope_place=place), HIDDEN)
    (x, _), angles = inputs(), rope.angles(torch.arange(9))
    index = branch(x, angles=angles)
    plain = IndexBranch(Indexer(2, WIDTH, rope=Rope(ROTATED), rope_place=place), HIDDEN)
    plain.load_state_dict(branch.state_dict())
    expected = plain(x, angles=angles)
    rotated = slice(ROTATED) if place == "first" else slice(-ROTATED, None)
    for x in expected[:2]:
        x.data[..., rotated] *= rope.amplitude
    products = [torch.einsum("bshd,btd->bsht", *pair[:2]) for pair in (index, expected)]
    torch.testing.assert_close(*products)


def test_reset_works_on_memory_without_values():
    with torch.device("meta"):
        branch = IndexBranch(INDEXERS["mistral_large4"], HIDDEN)
    branch.to_empty(device="cpu").reset_parameters()
    assert all(p.isfinite().all() for p in branch.parameters())
    assert branch.query_bias.tolist() == [1.0] * 4


def test_refusals():
    with pytest.raises(ValueError, match="q_lora_rank: expected the size of the q latent for"):
        IndexBranch(INDEXERS["hy_v4"], HIDDEN)
    with pytest.raises(ValueError, match="q_lora_rank: expected None for source='x', got 3"):
        IndexBranch(INDEXERS["minimax_m3"], HIDDEN, q_lora_rank=3)
    branch, (x, latent) = Family.of("mistral_large4").branch, inputs()
    angles, positions = branch.indexer.rope.angles(torch.arange(9)), torch.arange(9)
    with pytest.raises(ValueError, match="positions: expected a value"):
        branch(x, angles=angles)
    with pytest.raises(ValueError, match="angles: expected a value"):
        branch(x, positions=positions)
    with pytest.raises(ValueError, match="latent: expected None"):
        branch(x, latent, angles=angles, positions=positions)
