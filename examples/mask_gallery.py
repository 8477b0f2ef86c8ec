"""Draw attnlib's ready-made masks: the keys that each query sees, and the tiles that a kernel must compute.

Prints the number of full, partial and empty tiles of each mask, and writes ``mask_gallery.png``.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib import CAUSAL, Mask, mask_mod, masks, sliding
from attnlib.masks.band import AnyMask

EMPTY, PARTIAL, FULL_TILE = range(3)
TILES = ("#ffffff", "#fdd9a0", "#9ecae1")  # colours of an empty, a partial and a full tile
SEEN = 0.45  # opacity of the black over pairs of a query and a key that it sees


class Panel(NamedTuple):
    """A mask to draw, as bool ``[s, t]``, and the state of each of its tiles: empty, partial or full."""

    seen: Tensor
    tiles: Tensor

    @property
    def counts(self) -> tuple[int, int, int]:
        """The number of full, partial and empty tiles."""
        return tuple(int((self.tiles == kind).sum()) for kind in (FULL_TILE, PARTIAL, EMPTY))


def gallery(tokens: int) -> Mapping[str, AnyMask]:
    """Return masks by name, for a sequence of ``tokens`` tokens."""
    number = torch.arange(tokens)
    thirds = (3 * number // tokens)[None].int()
    spans = torch.where((number // (tokens // 8)) % 4 == 1, number // (tokens // 8), -1)[None].int()
    parents = [-1 if n == 0 else (n - 1) // 2 for n in range(tokens)]
    shown = torch.zeros(tokens, tokens, dtype=torch.bool)
    for n, parent in enumerate(parents):
        shown[n] = shown[parent] if parent >= 0 else False
        shown[n, n] = True
    return {
        "causal": CAUSAL,
        "sliding(t / 4)": sliding(tokens // 4),
        "documents": CAUSAL & masks.documents(thirds),
        "prefix of t / 3": masks.prefix_lm(torch.tensor([tokens // 3])),
        "window and global tokens": sliding(tokens // 8) | masks.global_tokens(tokens // 16),
        "attention sinks": masks.attention_sinks(tokens // 16, tokens // 4),
        "chunks": masks.chunked(tokens // 4),
        "spans in a causal text": masks.bidirectional_spans(spans),
        "dilated": CAUSAL & masks.dilated(4),
        "a tree of drafts": masks.tree(shown),
        "blocks by a function": mask_mod(lambda b, h, i, j: (i // 16 + j // 16) % 3 == 0),
        "~(window) & causal": CAUSAL & ~sliding(tokens // 4),
    }


def panel(mask: AnyMask, tokens: int, size: int) -> Panel:
    """Evaluate a mask for head 0 of sequence 0, and classify its ``size`` x ``size`` tiles."""
    zero, i, j = torch.tensor(0), torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = mask.visible(i, j) if isinstance(mask, Mask) else mask.visible(zero, zero, i, j, zero)
    seen = seen.broadcast_to(tokens, tokens)
    blocks = seen.unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2).flatten(2)
    return Panel(seen, blocks.any(-1).int() + blocks.all(-1))


def draw(panels: Mapping[str, Panel], size: int, picture: Path) -> None:
    """Write one picture of all masks, four per row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows = -(-len(panels) // 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(11, 2.9 * rows), squeeze=False)
    colors = ListedColormap(TILES)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (name, shown) in zip(axes.flat, panels.items(), strict=False):
        tokens = len(shown.seen)
        axis.imshow(
            shown.tiles.numpy(),
            cmap=colors,
            vmin=0,
            vmax=2,
            extent=(0, tokens, tokens, 0),
            interpolation="nearest",
        )
        pairs = torch.where(shown.seen, SEEN, 0.0)
        axis.imshow(
            torch.zeros(tokens, tokens).numpy(),
            cmap="gray",
            alpha=pairs.numpy(),
            extent=(0, tokens, tokens, 0),
        )
        axis.set_axis_on()
        axis.set_xticks(range(0, tokens + 1, size), [])
        axis.set_yticks(range(0, tokens + 1, size), [])
        axis.grid(color="#cccccc", linewidth=0.4)
        axis.tick_params(length=0)
        full, partial, empty = shown.counts
        axis.set_title(f"{name}\n{full} full, {partial} partial, {empty} empty", fontsize=8)
    meanings = {
        "seen, in a full tile": _darkened(TILES[FULL_TILE]),
        "seen, in a partial tile": _darkened(TILES[PARTIAL]),
        "hidden, in a partial tile": TILES[PARTIAL],
        "hidden, in an empty tile, which is skipped": TILES[EMPTY],
    }
    handles = [Patch(facecolor=x, edgecolor="#999999", label=name) for name, x in meanings.items()]
    figure.suptitle("Queries down, keys across", y=0.995)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.978), ncols=4, frameon=False)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _darkened(colour: str) -> str:
    """Return the colour of a tile under the black of a pair that is seen."""
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * (1 - SEEN)):02x}" for i in (1, 3, 5))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="sequence length, a multiple of 16 (default: 128)"
    )
    parser.add_argument("--tile", type=int, default=16, help="tile size, a divisor of --tokens (default: 16)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    options = parser.parse_args(arguments)
    if options.tokens < 16 or options.tokens % 16:
        parser.error(f"--tokens: expected a multiple of 16, got {options.tokens}")
    if options.tile < 1 or options.tokens % options.tile:
        parser.error(f"--tile: expected a divisor of {options.tokens}, got {options.tile}")
    panels = {
        name: panel(mask, options.tokens, options.tile) for name, mask in gallery(options.tokens).items()
    }
    for name, shown in panels.items():
        full, partial, empty = shown.counts
        print(f"{name:26} {full:4} full {partial:4} partial {empty:4} empty")
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "mask_gallery.png"
    draw(panels, options.tile, picture)
    print(f"\nwrote {picture}")


if __name__ == "__main__":
    main()
