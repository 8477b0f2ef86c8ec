"""Attention with shared prefixes: a call over the prefixes, a call over the other keys, and a merge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...call.call import Call
from ...dispatch.select import Explanation
from ...internal.checks import is_strided
from ...kv import KVView, RunCall
from ...masks.band import FULL
from ...merge import merge_states


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRoute:
    """The way attention reads a cache in which neighbouring sequences share their first pages.

    ``shared`` is a view of the shared keys. It has one row for each group of sequences, with the queries of
    the whole group packed. ``own`` is a view of each sequence's other keys. Shared keys come before all
    queries.
    """

    shared: KVView
    own: KVView

    is_partial: ClassVar[bool] = False

    def after_replace(self) -> None:
        """Return no route (None): attention reads a changed view in one call, since the view has all keys."""

    def attend(self, call: Call, run: RunCall, *, dry: bool = False) -> tuple[Tensor, Tensor] | None:
        """Attend to the shared keys once per group, to each sequence's own keys, and merge the results.

        Return None if some query does not see all earlier keys; then one call must read the whole view.
        """
        q, packed = call.q, call.kv.cu_seqlens_q is not None
        if not call.sees_all_before or not is_strided(q):
            return None
        together = q if packed or q.dim() != 4 else q.flatten(0, 1)
        state = run(call._replace(kv=self.own, lse=True))
        out, lse = run(Call(together, FULL, call.score._replace(sinks=None), kv=self.shared, lse=True))
        if q.dim() == 4:
            out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return merge_states(*state, out, lse)

    def explain(self, call: Call, parts: Sequence[Explanation]) -> Explanation:
        """Explain the call over each sequence's own keys; its field ``shared`` explains the other call."""
        own, shared = parts
        return own._replace(shared=shared)
