"""A grouped-query attention layer that scales its values."""

from torch import Tensor

from ...layers import GroupedQueryAttention
from ...layers.tensor_parallel import Share
from ...rope.rope import Angles


class ScaledValueAttention(GroupedQueryAttention):
    """Grouped-query attention whose values are multiplied by ``value_scale`` (MiMo-V2-Flash).

    A cache stores the scaled values.
    """

    value_scale: float = 1.0

    def key_value(
        self, x: Tensor, angles: Angles | None = None, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and scaled values, as :meth:`attnlib.GroupedQueryAttention.key_value` does."""
        k, v = super().key_value(x, angles, share)
        return k, v * self.value_scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, value_scale={self.value_scale}"
