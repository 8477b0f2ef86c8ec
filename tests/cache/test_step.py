"""The buffers of a step: fixed memory, rows in the order of the step, and positions behind left padding."""

import torch
from cache_model import PLAIN, append_all, both, paged, refused


@both
def test_the_same_layers_and_the_same_memory_at_every_step(make):
    twin = make()
    first, second, third = twin.admit(3)
    tensors: dict[str, set] = {}
    steps = [2, 1, {first: 3}, {second: 1, first: 1}, 1, {third: 2, second: 1, first: 0}]
    with twin.cache.step(0) as layers:
        pass
    for tokens in steps:
        _, numbers = twin.draw(tokens)
        with twin.cache.step(tokens) as again:
            assert len(again) == len(layers)
            assert all(a is b for a, b in zip(again, layers, strict=True))
            for i, view in enumerate(append_all(again, numbers)):
                assert view.positions is again[i].positions
                names = {"table": view.table, "starts": view.starts, "lengths": view.lengths}
                names |= {"positions": view.positions, "slots": again[i]._slots}
                names |= {"cu_seqlens_q": view.cu_seqlens_q} if isinstance(tokens, dict) else {}
                names |= {plane: getattr(view, plane) for plane in ("k", "v")}
                for name, tensor in names.items():
                    by_window = {
                        "table": view.layout.window,
                        "starts": view.layout.window,
                        "slots": view.layout.window,
                    }
                    key = f"{name} {i if name in 'kv' else by_window.get(name)}"
                    tensors.setdefault(key, set()).add(tensor.data_ptr())
                    assert tensor.dtype == {"slots": torch.int64, "k": torch.float32, "v": torch.float32}.get(
                        name, torch.int32
                    )
    assert len(tensors) == 3 * 3 + 3 + 2 * len(layers)
    assert all(len(addresses) == 1 for addresses in tensors.values())


@both
def test_rows_follow_the_order_of_the_step(make):
    twin = make()
    first, second, third = twin.admit(3)
    twin.step({first: 1, second: 2, third: 3})
    with twin.cache.read({third: 1, first: 2}) as layers:
        assert layers[0].view().lengths.tolist() == [3, 1]
        assert layers[0].view().cu_seqlens_q.tolist() == [0, 1, 3]
    twin.release(second)
    (fourth,) = twin.admit()
    twin.step(1)
    with twin.cache.read(5) as layers:
        assert layers[0].view().lengths.tolist() == [2, 4, 1]
        assert layers[0].view().cu_seqlens_q is None
    assert twin.cache.length(fourth) == 1


@both
def test_left_padding_moves_rotary_positions_and_is_never_visible(make):
    twin = make()
    padded, plain = twin.admit(2, left_padding=[3, 0])
    refused(
        twin,
        ValueError,
        lambda: twin.step({plain: 1, padded: 1}),
        "sequence 1 of the step has left padding 3",
    )
    twin.step(2)
    refused(twin, ValueError, lambda: twin.step({padded: 1}), "padding arrives in dense steps")
    twin.step(3)
    twin.step({padded: 2})  # the padding is stored by now
    (child,) = twin.fork(padded)
    twin.step({child: 1})
    twin.check()


def test_positions_by_example():
    cache = paged(PLAIN).cache
    keys = torch.ones(5, PLAIN.heads, PLAIN.dim)
    padded, plain = cache.admit(2, left_padding=[3, 0])
    expected = {2: [[0, 0], [0, 1]], 3: [[0, 0, 1], [2, 3, 4]]}
    for tokens, positions in expected.items():
        with cache.step(tokens) as (layer,):
            assert layer.positions.tolist() == positions
            layer.append(*[keys[:tokens].expand(2, -1, -1, -1)] * 2)
            assert layer.view().starts.tolist() == [3, 0]
    with cache.step({plain: 2, padded: 1}) as (layer,):
        assert layer.positions.tolist() == [5, 6, 2]
        layer.append(*[keys[:3]] * 2)
        assert layer.view().starts.tolist() == [0, 3]
