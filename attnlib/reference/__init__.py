"""Reference attention: the definition in plain torch, and the algorithms of the papers.

Every backend is tested against the definition. The algorithms are for reading: they solve one head, tile by
tile, and count every access to slow memory.
"""

from .definition import attend as attend
