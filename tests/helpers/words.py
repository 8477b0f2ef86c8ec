"""The words that attnlib's names and sentences do without: (word, folder, the word to use instead)."""

# In names that the code of a folder defines, as one of their parts; "" is the whole package.
IN_NAMES = (
    ("told", "", "explained, or reported"),
    ("tell", "", "explain, or report"),
    ("asked", "dispatch", "explains"),
    ("hinted", "", "warned"),
    ("dealt", "", "sharded"),
    ("held", "cache", "stored, or shard"),
    ("fresh", "cache", "new"),
    ("stain", "", "poison"),
    ("strike", "", "poison"),
    ("ledger", "", "allocator"),
    ("book", "", "allocator"),
    ("trunk", "", "prefix"),
    ("remembered", "", "cached"),
    ("remember", "dispatch", "cache"),
    ("prepared", "dispatch", "cached"),
    ("prepared", "call", "cached"),
    ("repeated", "backends", "replay"),
    ("drawn", "backends", "scheduled"),
    ("listed", "backends", "sparse"),
    ("many", "backends/_triton/kernels/hopper", "rows_64"),
    ("few", "backends/_triton/kernels/hopper", "rows_16"),
    ("turned", "backends", "transposed"),
    ("turned", "rope", "rotated"),
    ("contender", "", "implementation"),
    ("door", "", "replacement"),
    ("said", "", "the noun"),
    ("whose", "", "the noun"),
)
# In docstrings and comments: words without an ordinary meaning in this field.
IN_PROSE = ("dealt", "hinted", "stain", "ledger", "told", "contender", "whereof", "trunk")
