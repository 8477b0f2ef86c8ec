"""The definition of attention in plain torch, which every backend is tested against, and the papers'
algorithms.

The algorithms solve one head, tile by tile, and count every access to slow memory: they are for reading.
"""

from .definition import attend as attend
