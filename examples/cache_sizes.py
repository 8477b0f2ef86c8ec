"""Compare the caches of a model as MHA, GQA, MQA or MLA: a table, a picture, and the bytes of real caches.

Prints the table of ``python -m attnlib sizes``, then makes a real KVCache for every variant, grows sequences
in it, and fails if it does not use exactly the bytes that the formula predicts. The caches are on the meta
device, where tensors have shapes but no memory, so they may be larger than the machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from attnlib import KVCache
from attnlib.sizes import Model, Setting, cache_bytes, model, rows, table, variants
from attnlib.sizes.files import draw


def check(variant: Model, setting: Setting) -> int:
    """Grow a cache to the smallest batch and longest context of a setting; return the bytes that it uses.

    Raises:
        SystemExit: at some context length, the cache does not use the bytes that the formula predicts.
    """
    layouts = variant.layouts(dtype=setting.dtype, storage_dtype=setting.storage_dtype)
    batch, size = min(setting.batches), setting.page_size
    pages = batch * -(-max(setting.contexts) // size)
    cache = KVCache.paged(layouts, pages=pages, page_size=size, max_sequences=batch, device="meta")
    handles = cache.admit(batch)
    for context in sorted(setting.contexts):
        with cache.step(context - cache.length(handles[0]), replay=True):
            pass  # layers would append their keys and values here; the pages are reserved either way
        formula = cache_bytes(layouts, [context] * batch, page_size=size)
        if cache.used_bytes != formula:
            raise SystemExit(
                f"{variant.kind} at {context:,} tokens: expected {formula:,} bytes by formula, got "
                f"{cache.used_bytes:,}"
            )
    return cache.used_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-2-7b", help="a model that `python -m attnlib sizes --list` names"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    options = parser.parse_args(arguments)
    try:
        own = model(options.model)
    except ValueError as error:
        parser.error(str(error))
    setting, models = Setting(), variants(own)
    print(table(own, rows(models, setting), setting), end="\n\n")
    for variant in models:
        print(
            f"{variant.kind:10}  {check(variant, setting):18,} bytes in a real cache, as the formula predicts"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "cache_sizes.png"
    try:
        draw(own, models, setting, picture)
    except ModuleNotFoundError as error:  # names the extra to install
        raise SystemExit(str(error)) from None
    print(f"\nwrote {picture}")


if __name__ == "__main__":
    main()
