"""The layers of a cache together: what a step tells them, and the layers that forgot to append."""

import pytest
import torch
from cache_model import append, append_all, paged, refused


def test_prefill_and_history():
    twin = paged(pages=64, page_size=16, max_sequences=2)
    first, second = twin.admit(2)
    seen = []
    for tokens in (1, 16, 17, {first: 1, second: 17}, {first: 1}, {second: 17}):
        before = max(
            len(twin.model[handle]) for handle in (tokens if isinstance(tokens, dict) else twin.model)
        )
        with twin.cache.step(tokens) as layers:
            assert {(layer.prefill, layer.history) for layer in layers} == {
                (layers[0].prefill, layers[0].history)
            }
            seen.append((before, layers[0].prefill, layers[0].history))
            append_all(layers, torch.zeros(layers[0].positions.shape, dtype=torch.int64))
        for handle in twin.model:
            twin.model[handle] = [0] * twin.cache.length(handle)
    assert seen == [
        (0, False, 0),
        (1, False, 1),
        (17, True, 32),
        (34, True, 64),
        (35, False, 64),
        (51, True, 64),
    ]


def test_a_step_without_any_append_commits_only_what_a_graph_appends():
    twin = paged()
    (handle,) = twin.admit()
    twin.step(3)

    def forgotten():
        with twin.cache.step(2):
            pass

    refused(twin, RuntimeError, forgotten, r"step: layers \[0, 1, 2, 3\] of 4 did not append.*replay=True")
    twin.check()
    with twin.cache.step(2, replay=True):
        pass  # a replayed CUDA graph has written
    assert twin.cache.length(handle) == 5
    with twin.cache.step({handle: 0}):
        pass  # nothing was to be written
    with pytest.raises(TypeError, match="replay: expected a bool, got int"), twin.cache.step(1, replay=1):
        pass


def test_a_replay_of_some_layers_is_no_step():
    twin = paged()
    (handle,) = twin.admit()
    with pytest.raises(RuntimeError, match=r"layers \[1, 2, 3\] of 4 did not append"):  # noqa: SIM117
        with twin.cache.step(1, replay=True) as layers:
            append(layers[0], torch.zeros(1, 1, dtype=torch.int64), 0)
    assert twin.cache.length(handle) == 0
