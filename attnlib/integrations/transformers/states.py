"""The recurrent states of a hybrid model, which a paged cache keeps beside its pages.

A state, such as that of a convolution, has a fixed size per row and is transformers' own. It changes in
place, so it cannot take back tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer


class StatefulCache(Cache):
    """A cache whose layers ``counts`` keep recurrent states; it maps their numbers to their state counts.

    A step that failed may have changed some states, so the cache must be reset before the next step.
    """

    _counts: Mapping[int, int] = {}
    _is_touched = False  # a model has used states since its forward began
    _is_torn = False  # a step that used states has failed

    def renew_states(self) -> None:
        """Replace all states by empty ones."""
        self._is_touched = self._is_torn = False
        for number, count in self._counts.items():
            self.layers[number] = LinearAttentionLayer(count)

    def select_states(self, rows: Sequence[int]) -> None:
        """Make row i of each state a copy of the old row ``rows[i]``."""
        for number in self._counts:
            self.layers[number].reorder_cache(torch.tensor(rows))

    def refuse_states(self, name: str) -> None:
        """Raise NotImplementedError if there are states, because ``name`` would have to take back tokens."""
        if self._counts:
            raise NotImplementedError(
                f"{name}: expected layers that can take back tokens, got the recurrent state of layer "
                f"{min(self._counts)}"
            )

    def check_states(self) -> None:
        """Raise RuntimeError if a step that used states has failed."""
        if self._is_torn:
            raise RuntimeError(
                "hf.PagedCache: expected recurrent states from before the step that failed, got states that "
                "it may have changed; call reset()"
            )

    def end_of_states(self, *, failed: bool) -> None:
        """Record that a forward has ended."""
        self._is_torn = self._is_torn or (failed and self._is_touched)
        self._is_touched = False

    @property
    def is_croppable(self) -> bool:
        """True if the cache can take back tokens, which recurrent states cannot."""
        return not self._counts

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the state of a convolution, as transformers' caches do."""
        self._is_touched = True
        return super().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state of a convolution, as transformers' caches do."""
        self._is_touched = True
        return super().update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the state of linear attention, as transformers' caches do."""
        self._is_touched = True
        return super().get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state of linear attention, as transformers' caches do."""
        self._is_touched = True
        return super().update_recurrent_state(*args, **kwargs)


def state_counts(config: Any, numbers: Sequence[int]) -> dict[int, int]:
    """Return how many states each of these layers of a model keeps."""
    per_layer = getattr(config, "per_layer_config", None)
    return {
        number: getattr(config if per_layer is None else per_layer[number], "number_of_conv_states", 1)
        for number in numbers
    }
