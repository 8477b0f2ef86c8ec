"""Attention over a view with shared prefixes: a call over them, a call over the rest, and a merge."""

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
    """The route of a view whose neighbours share first pages.

    ``shared`` holds the keys that neighbours share: one row for each group, whose queries are those of its
    sequences, packed. ``own`` holds the other keys of each sequence. All shared keys come before all queries.
    """

    shared: KVView
    own: KVView

    is_partial: ClassVar[bool] = False

    def after_replace(self) -> None:
        """Return no route: a changed view is read as a whole, since its planes hold every key."""

    def attend(self, call: Call, run: RunCall, *, dry: bool = False) -> tuple[Tensor, Tensor] | None:
        """Read the shared keys once for all queries of a group, each sequence's own keys, and merge.

        None if some query does not see all keys before its own, so that one call over the whole view has to
        do.
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
        """Explain the call over each sequence's own keys, with that over shared keys as ``shared``."""
        own, shared = parts
        return own._replace(shared=shared)
