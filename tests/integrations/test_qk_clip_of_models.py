"""QK-clip of transformers models with replaced layers."""

import pytest
import torch

from attnlib.qk_clip import QKClip
from tests.integrations.test_transformers import both, tokens


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_replaced_layers_are_recorded_and_clipped(family):
    """The input of the first layer does not depend on attention, so its maxima shrink exactly."""
    _, model = both(family, "layers")
    ids, qk_clip = tokens(model), QKClip(model, bound=0.01)
    found = []
    for _ in range(2):
        with qk_clip.record():
            model.train()(ids, labels=ids).loss.backward()
        found.append(qk_clip.step())
    before, after = found
    assert len(before) == 2
    assert all(x.isfinite().all() and x.gt(0.01).any() for x in before.values())
    first = next(iter(before))
    groups = 2 if family == "llama" else 4
    expected = before[first].unflatten(0, (groups, -1))
    expected = expected * (0.01 / expected.amax(1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(after[first], expected.flatten(), rtol=1e-4, atol=1e-6)
