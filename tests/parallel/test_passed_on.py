"""The order in which the ranks of a ring get each other's tensors; test_several_gpus.py runs transfers."""

from types import SimpleNamespace

import pytest

from attnlib.parallel import exchange


class Held(SimpleNamespace):
    """A tensor of rank ``owner``, wherever it is."""

    device = "anywhere"


class Transfer:
    """A transfer of the tensors of one rank of ``group`` to the next; ``open`` has those not waited for."""

    open: list["Transfer"]

    def __init__(self, tensors, group, into=None):
        self.arriving = [Held(owner=(x.owner - 1) % group.size(), is_cuda=x.is_cuda) for x in tensors]
        self.group = group
        self.open.append(self)

    def wait(self):
        assert self.open.pop(0) is self
        return self.arriving

    def onwards(self, stream):
        return Transfer(self.arriving, self.group)


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_tensors_come_in_order(monkeypatch, ranks, is_cuda):
    """On GPUs, two transfers are under way until the last two; elsewhere one."""
    monkeypatch.setattr(exchange, "Passing", Transfer)
    monkeypatch.setattr(exchange.torch.cuda, "Stream", lambda device: "stream")
    for rank in range(ranks):
        Transfer.open = []
        group = SimpleNamespace(size=lambda: ranks, rank=lambda own=rank: own)
        found = []
        for owner, (held,) in exchange.passed_on([Held(owner=rank, is_cuda=is_cuda)], group):
            assert held.owner == owner
            found.append((owner, len(Transfer.open)))
        ahead = 2 if is_cuda else 1
        assert found == [((rank - n) % ranks, min(ahead, ranks - 1 - n)) for n in range(ranks)]
        assert not Transfer.open
