"""Check that stock transformers loads a converted folder and that its logits still match the source."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint_files.folder import CONFIG, read_folder
from ..checkpoint.errors import CheckpointError, VerificationError
from ..checkpoint.verify import Errors
from ..stock import class_of, read_config, stock
from .comparison import Measures, compare
from .lost import nothing_lost
from .names import amiss, listed

# A lossless conversion may change logits by this much, relative to the largest logit, because layers amplify
# rounding errors of 1e-6.
SAME = 1e-3
TOKENS = 64


class StockCheck:
    """Compare a converted folder with the model that transformers builds from its config.json.

    Tensor names and shapes are always compared: for the source when the check is created, and for the result
    on each call. With ``logits``, each call also runs :func:`compare` on ``tokens`` ``[windows, n]`` or
    ``[n]`` (None: random tokens). If the tokens come from a text, ``text`` names it, and perplexities are
    reported too, also for each text if ``names`` has the name of each window's text. Call the check with the
    result folder and its layer errors; it returns measures for the report. Tensors of the source that its own
    model does not use are listed but are not an error. ``follow_links`` is passed to :func:`read_folder` for
    the source. ``exact`` is the number of keys that index branches choose: in longer windows, the logits of a
    lossless conversion differ. None means that they never do.

    Raises:
        CheckpointError: transformers rejects the source's config.json, or would randomly initialize
            weights that are missing in the source or have another shape there.
        VerificationError: raised by a call. Weights are missing, have another shape, or are neither
            expected nor in the source; or the logits differ by more than rounding although all layer
            errors are within rounding.
    """

    def __init__(
        self,
        source: Path,
        *,
        logits: bool,
        tokens: Tensor | None = None,
        text: str | None = None,
        names: Sequence[str] = (),
        device: torch.device | str = "cpu",
        follow_links: bool = False,
        exact: int | None = None,
        advance: Callable[[], object] = lambda: None,
    ):
        self.source: Path = source
        self.follow_links: bool = follow_links
        self.logits: bool = logits
        self.tokens: Tensor | None = tokens
        self.text: str | None = text
        self.names: Sequence[str] = names
        self.device: torch.device | str = device
        self.exact: int | None = exact
        self.advance: Callable[[], object] = advance
        found = amiss(source, follow_links=follow_links)
        self._spare = found.pop("unexpected")
        if lacking := listed(found):
            needed = f"{class_of(read_config(source)).__name__}, which {CONFIG} asks for"
            raise CheckpointError(
                f"expected all weights of {needed}, got {lacking}; transformers would initialize them "
                "randomly"
            )

    def __call__(self, result: Path, errors: Errors) -> Measures:
        try:
            found = amiss(result)
        except CheckpointError as error:
            raise VerificationError(str(error)) from error
        spare = sorted(found["unexpected"] & self._spare)
        found["unexpected"] -= self._spare
        if wrong := listed(found):
            raise VerificationError(f"expected a folder that transformers loads completely, got {wrong}")
        measures = {"loaded_by": f"transformers {stock().__version__}"}
        measures |= {"unexpected_as_in_source": spare} if spare else {}
        return measures | (self._compared(result, errors) if self.logits else {})

    def _compared(self, result: Path, errors: Errors) -> Measures:
        tokens = torch.atleast_2d(random_tokens(self.source) if self.tokens is None else self.tokens)
        old = read_folder(self.source, follow_links=self.follow_links)
        new = read_folder(result)
        measures = compare(old, new, tokens, names=self.names, device=self.device, advance=self.advance)
        if isinstance(measures, str):
            return {"logits": measures}
        difference, largest = measures["largest_logit_difference"], measures["largest_logit"]
        lossless = nothing_lost(errors) and (self.exact is None or tokens.shape[1] <= self.exact)
        if not difference <= (SAME * largest if lossless else math.inf):
            wanted = (
                "those of the source, as the layer errors are those of a lossless conversion"
                if lossless
                else "finite numbers"
            )
            raise VerificationError(
                f"logits: expected {wanted}, got a difference of {difference:.3g} where the largest is "
                f"{largest:.3g}"
            )
        if self.text is None:
            return {name: value for name, value in measures.items() if not name.startswith("perplexity")}
        return {"text": self.text} | measures


def random_tokens(folder: Path) -> Tensor:
    """Return random tokens from a fixed seed: TOKENS of them, or as many as the model has positions."""
    config = read_config(folder).get_text_config()
    count = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
