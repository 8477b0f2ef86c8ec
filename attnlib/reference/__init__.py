"""The definition of attention in plain torch: what every backend is tested against, never the fast path."""

from .definition import attend as attend
