"""Index branches, which choose the keys that a query attends to, and learn the choice.

``indexer.py`` describes a branch, ``branch.py`` has its weights, ``scores.py`` scores keys, ``choosing.py``
lists the best ones, ``visible.py`` the best of those that a mask shows, ``compacted.py`` the best blocks of
visible keys, ``chosen.py`` holds the lists for calls of layers, and ``loss.py`` trains the scores to follow
the attention of the layer.
"""

from .branch import IndexBranch as IndexBranch
from .branch import IndexTensors as IndexTensors
from .choosing import choose as choose
from .choosing import first_keys as first_keys
from .chosen import Chosen as Chosen
from .chosen import keys_of as keys_of
from .compacted import choose_compacted as choose_compacted
from .indexer import Indexer as Indexer
from .loss import MainAttention as MainAttention
from .loss import index_loss as index_loss
from .scores import AnyKeys as AnyKeys
from .scores import StoredKeys as StoredKeys
from .scores import reads_stored as reads_stored
from .visible import choose_visible as choose_visible
