"""The rows of a cache that the kernel for lists writes for selected tokens, as Hopper's kernel reads them."""

import pytest
import torch
from kernel_helpers import DEVICE
from selected_cases import lists
from torch import Tensor

from attnlib.backends._triton.launching.config import LaunchConfig, power_of_two
from attnlib.backends._triton.launching.launch import Launch
from attnlib.backends._triton.launching.places import places_of
from attnlib.internal.checks import INT32

LENGTHS, TOKENS, WINDOW = (300, 0, 170), 320, 250
ABSENT = "block_ids", "key_starts", "key_ends", "cu_seqlens_q", "cu_seqlens_k", "origin"


def written(indices: Tensor, table: Tensor, page: int, pages: int) -> list[list[int]]:
    """The rows that the kernel writes for the list of each sequence."""
    from attnlib.backends._triton.kernels.selected.lists import list_blocks

    b, n = indices.shape[0], indices.shape[-1]
    places = places_of(b, n, TOKENS)
    arguments = places.arguments | dict.fromkeys(("owners", "of_owner", "blocks"))
    arguments |= {
        "batch": b, "s": 1, "t": TOKENS, "planes": 1, "slots": n, "left": WINDOW - 1, "right": 0, "prefix": 0,
        "stride_table": table.shape[1], "pages": pages, "page_rows": page or TOKENS, "BLOCK_SIZE": 1,
        "PAGE": page, "EARLY": False,
    }  # fmt: skip
    made = torch.full((places.numbers,), -7, dtype=torch.int32, device=DEVICE)
    given = {"selected": indices, "lengths": torch.tensor(LENGTHS, dtype=torch.int32), "table": table}
    tensors = {name: x.to(DEVICE) for name, x in given.items()} | {"lists": made} | dict.fromkeys(ABSENT)
    Launch(list_blocks, b, arguments, LaunchConfig(power_of_two(n), 0, 1, 4)).on(tensors)
    found = made[: b * (n + 1)].reshape(b, n + 1).tolist()
    return [row[1 : 1 + row[0]] for row in found]


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("n", [40, 200])  # sorted, or with a bit for each token
@pytest.mark.parametrize("page", [16, 1, 0])
def test_each_visible_token_gives_its_row_once(page, n, repeated):
    """Entries of the table that are out of range name the last page; others belong to no visible token."""
    columns = TOKENS // page if page else 1
    pages, generator = 3 * columns + 2, torch.Generator().manual_seed(n)
    table = torch.randperm(pages, generator=generator)[: 3 * columns].reshape(3, columns).int()
    table[0, 0], table[1], table[2, columns // 2] = -1, INT32, INT32
    indices = lists(3, 1, 1, n, TOKENS, seed=page + n)
    if not repeated:
        chosen = [torch.randperm(TOKENS, generator=generator)[:n] for _ in LENGTHS]
        indices = torch.stack(chosen)[:, None, None].int()
    found = written(indices, table, page, pages)
    size = page or TOKENS
    for length, own, named, rows in zip(LENGTHS, indices, table.tolist(), found, strict=True):
        seen = {j for j in own.flatten().tolist() if max(0, length - WINDOW) <= j < length}
        wanted = [min(named[j // size] % 2**32, pages - 1) * size + j % size for j in seen]
        assert sorted(rows) == sorted(wanted)
    assert found[2]
