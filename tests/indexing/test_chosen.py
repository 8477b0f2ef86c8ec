"""A choice is the mask of its lists, or none."""

import torch

from attnlib import FULL
from attnlib.indexing import Chosen


def test_a_choice_is_the_mask_of_its_lists():
    lists = torch.tensor([[[[1, -1]], [[0, 1]]]], dtype=torch.int32)
    selection = Chosen(lists, 4).mask.selection
    assert selection.indices is lists
    assert selection.block_size == 4


def test_all_keys_need_no_lists():
    assert Chosen(None, 4).mask is FULL
