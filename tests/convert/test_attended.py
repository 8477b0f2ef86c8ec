"""Tokens weighed by the attention that they get, and what an error of keys and values costs."""

import torch
from convert_helpers import HIDDEN, D, close, grouped, heads_of, tokens

from attnlib import rotate
from attnlib.convert import Calibration
from attnlib.convert.latent.attended import SHARE, attended, attention
from attnlib.convert.latent.cost import Cost
from attnlib.convert.latent.embedding import concentrate


def seen_of(layer, calibration):
    return attended(heads_of(layer), calibration, scale=layer.scale)


def test_attention_is_the_square_of_softmax():
    layer, x = grouped((2, 2), rope="partial-yarn", bias=True), tokens(40)
    heads, y = heads_of(layer), torch.nn.functional.pad(x, (0, 1), value=1.0)
    q, k = (
        torch.einsum("tm,hdm->htd", y, heads.q),
        torch.einsum("tm,gdm->gtd", y, heads.k).repeat_interleave(2, 0),
    )
    q[..., : layer.rope.dim] *= layer.rope.amplitude**2
    squares = (q @ k.mT * layer.scale).softmax(-1).square().sum((0, 1))
    close(attention(heads, y, scale=layer.scale), squares / squares.sum())


def test_weights_and_moment_are_one_mean():
    layer, x = grouped((2, 2), bias=True), tokens(60)
    seen = seen_of(layer, Calibration.of([x]))
    close(seen.weights.sum(), torch.ones((), dtype=torch.float64))
    assert seen.weights.min() >= (1 - SHARE) / 60
    close(seen.moment, (seen.inputs.T * seen.weights) @ seen.inputs)


def test_queries_that_ask_for_nothing_weigh_all_alike():
    layer, x = grouped((2, 2)), tokens(60)
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    calibration = Calibration.of([x])
    seen = seen_of(layer, calibration)
    close(seen.weights, torch.full_like(seen.weights, 1 / 60))
    close(seen.moment, calibration.moment)


def test_without_inputs_moments_are_as_they_were():
    layer, calibration = grouped((2, 2)), Calibration.of([tokens(60)])
    for bare in (Calibration(60, calibration.moment), Calibration.white(HIDDEN)):
        seen = seen_of(layer, bare)
        assert seen.inputs is None
        assert torch.equal(seen.moment, bare.moment)


def test_a_token_that_all_attend_to_is_heard():
    """One of a thousand, whose keys are those that all queries ask for."""
    layer, x = grouped((2, 1), rope="none", bias=True), tokens(1000)
    x[500] *= 10
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.k_proj.bias.zero_()
        asked = layer.k_proj(x[500]).unflatten(0, (2, D))
        layer.q_proj.bias.copy_((asked * 60 / asked.square().sum(-1, keepdim=True)).flatten())
    seen = seen_of(layer, Calibration.of([x]))
    assert seen.weights.argmax() == 500
    assert seen.weights[500] > SHARE / 2


def test_what_missing_all_costs_is_what_scores_and_outputs_have():
    """By hand, of every query at every distance."""
    layer, x, reach = grouped((2, 2), rope="partial-yarn", bias=True), tokens(30), 5
    heads, calibration = heads_of(layer), Calibration.of([x])
    seen = seen_of(layer, calibration)
    latent, _ = concentrate(heads, 4, calibration, reach=reach)
    cost = Cost.of(latent, heads, calibration, seen, reach=reach)
    q, k = (
        torch.einsum("tm,hdm->htd", seen.inputs, rows) for rows in (heads.q, heads.k.repeat_interleave(2, 0))
    )
    q[..., : layer.rope.dim] *= layer.rope.amplitude**2
    keys, norm = 0.0, sum(1 / (n + 1) for n in range(reach))
    for n in range(reach):
        turned = rotate(q.transpose(0, 1)[None], layer.rope.angles(torch.full((30,), n)))[0]
        still = rotate(k.transpose(0, 1)[None], layer.rope.angles(torch.zeros(30, dtype=torch.long)))[0]
        scores = torch.einsum("shd,thd->hst", turned, still)
        keys += (scores.square().mean(1) * seen.weights).sum() / (n + 1) / norm
    torch.testing.assert_close(cost.all_keys, keys, rtol=1e-5, atol=0.0)  # angles are fp32
    values = torch.einsum("tm,hdm->htd", seen.inputs, heads.v.repeat_interleave(2, 0))
    outputs = torch.einsum("htd,mhd->htm", values, heads.o).square().sum((0, 2))
    close(cost.all_values, (outputs * seen.weights).sum())
    free = torch.einsum("tm,hnm->htn", seen.inputs, latent.q_nope)  # which has the amplitude already
    close(cost.keys, (free.mT @ free / 30).unflatten(0, (2, 2)).sum(1))
    assert cost.values.shape == (2, D, D)
