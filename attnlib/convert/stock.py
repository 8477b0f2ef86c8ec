"""Whether stock transformers loads a converted folder, and whether it says the same as before.

Names and shapes are checked by transformers' own loading, of tensors that have a shape and no memory, so that the size
of a model does not matter. Logits need the models themselves, in fp32, one after the other.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checkpoint.errors import CheckpointError, VerificationError
from .checkpoint.folder import CONFIG, read_folder
from .checkpoint.verify import Errors
from .latent.deepseek_layer import BASELINE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOSSLESS = 1e-6  # of every error that a converter reports; more than what fp32 rounds
SAME = 1e-3  # of the largest logit: what rounding of 1e-6 may become on its way through all layers
TOKENS = 64


def stock() -> ModuleType:
    """The transformers package.

    Raises:
        ImportError: it is not installed; says what to install.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("checks and text need transformers: pip install 'attnlib[hf]'") from error
    return transformers


def read_config(folder: Path) -> "PreTrainedConfig":
    """The config of a folder as transformers reads it; runs no code from there.

    Raises:
        CheckpointError: transformers refuses it.
    """
    configs = stock().AutoConfig
    from huggingface_hub.errors import StrictDataclassError

    refusals = (StrictDataclassError, ValueError, LookupError, TypeError, AttributeError, OSError, ArithmeticError)
    try:
        with quiet():
            return configs.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except refusals as error:
        raise CheckpointError(f"{CONFIG}: transformers does not read it: {str(error)[:200]}") from error


class StockCheck:
    """Holds a converted folder against the model that transformers makes of its config.json.

    Names and shapes always, of the source when this is made; also logits if ``logits``, over ``tokens`` ``[n]`` as one
    sequence (None: random ones). Called with the folder and the errors of its layers, it returns measures for the
    report. Tensors of the source that its model has not are no error: no loader uses them, and they are listed.

    ``follow_links`` is that of :func:`.checkpoint.folder.read_folder`, of the source.

    Raises:
        CheckpointError: transformers refuses the source's config.json, or would fill in with random numbers what the
            source lacks or has in another shape.
        VerificationError: when called: weights are missing or of another shape, or unexpected and not of the source; or
            logits differ by more than rounding though the layers' errors say that nothing was lost.
    """

    def __init__(self, source: Path, *, logits: bool, tokens: Tensor | None = None, follow_links: bool = False):
        self.source = source
        self.logits = logits
        self.tokens = tokens
        found = _amiss(source, follow_links=follow_links)
        self._spare = found.pop("unexpected")
        if lacking := _listed(found):
            needed = f"{_class_of(source).__name__}, which {CONFIG} asks for"
            raise CheckpointError(f"expected all weights of {needed}, got {lacking}; transformers would make them up")

    def __call__(self, result: Path, errors: Errors) -> dict[str, object]:
        try:
            found = _amiss(result)
        except CheckpointError as error:
            raise VerificationError(str(error)) from error
        spare = sorted(found["unexpected"] & self._spare)
        found["unexpected"] -= self._spare
        if wrong := _listed(found):
            raise VerificationError(f"expected a folder that transformers loads whole, got {wrong}")
        measures = {"loaded_by": f"transformers {stock().__version__}"}
        measures |= {"unexpected_as_in_source": spare} if spare else {}
        return measures | (self._compare(result, errors) if self.logits else {})

    def _compare(self, result: Path, errors: Errors) -> dict[str, object]:
        tokens = random_tokens(self.source) if self.tokens is None else self.tokens
        old, new = logits_of(self.source, tokens), logits_of(result, tokens)
        if old is None or new is None:
            return {"logits": "none: the model has no head"}
        if not old.isfinite().all():
            return {"logits": "none: those of the source are not finite"}
        difference, largest = float((old - new).abs().max()), float(old.abs().max())
        old, new = old.double().log_softmax(-1), new.double().log_softmax(-1)
        kl = float((old.exp() * (old - new)).sum(-1).mean())
        lossless = nothing_lost(errors)
        if not difference <= (SAME * largest if lossless else math.inf):
            wanted = "those of the source, for by its errors the conversion lost nothing" if lossless else "numbers"
            raise VerificationError(
                f"logits: expected {wanted}, got a difference of {difference:.3g} where the largest is {largest:.3g}"
            )
        return {"tokens": len(tokens), "largest_logit": largest, "largest_logit_difference": difference, "kl_nats": kl}


def nothing_lost(errors: Errors) -> bool:
    """Whether every error of every layer is no more than rounding to fp32."""
    found = [error for layer in errors.values() for error in own_errors(layer).values()]
    return bool(found) and all(error is not None and error < LOSSLESS for error in found)


def own_errors(errors: Mapping[str, float | None]) -> dict[str, float | None]:
    """A layer's errors without those of what it is compared with."""
    return {name: error for name, error in errors.items() if not name.startswith(BASELINE)}


def random_tokens(folder: Path) -> Tensor:
    """TOKENS tokens of the model's vocabulary, or as many as it has positions; always the same."""
    config = read_config(folder).get_text_config()
    count = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))


def logits_of(folder: Path, tokens: Tensor) -> Tensor | None:
    """What the model of a folder says after each of ``tokens`` ``[n]``, in fp32: ``[n, vocabulary]``; None: no head."""
    with quiet():
        model = _class_of(folder).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
        with torch.no_grad():
            logits = getattr(model.eval()(tokens[None]), "logits", None)
    return None if logits is None else logits[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the logs and bars of transformers."""
    logging = stock().utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _amiss(folder: Path, *, follow_links: bool = False) -> dict[str, set[str]]:
    """What is missing, unexpected or of another shape when transformers loads the tensors of a folder."""
    # Experts that are stacked would take their memory, if not on meta; transformers takes that from accelerate alone.
    where = {"device_map": "meta"} if stock().utils.is_accelerate_available() else {}
    zero = torch.zeros((), device=where.get("device_map"))
    tensors = read_folder(folder, follow_links=follow_links).tensors
    try:
        with quiet():
            _, info = _class_of(folder).from_pretrained(
                None,
                config=read_config(folder),
                state_dict={name: zero.expand(stored.entry.shape) for name, stored in tensors.items()},
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **where,
            )
    except RuntimeError as error:  # of tensors that it puts together
        named = ", ".join(_holes(tensors)) or str(error)[:200]
        raise CheckpointError(f"expected all parts of what transformers puts together, got none of {named}") from error
    mismatched = {f"{name} {list(stored)} for {list(made)}" for name, stored, made in info["mismatched_keys"]}
    return {"missing": set(info["missing_keys"]), "unexpected": set(info["unexpected_keys"]), "mismatched": mismatched}


def _holes(names: Iterable[str]) -> list[str]:
    """The tensors that some experts of a layer have and others lack."""
    found = [match.groups() for name in names if (match := re.fullmatch(r"(.*\.experts\.)([0-9]+)(\..*)", name))]
    layers = {layer: {(n, part) for other, n, part in found if other == layer} for layer, _, _ in found}
    return sorted(
        f"{layer}{n}{part}"
        for layer, held in layers.items()
        for n in {n for n, _ in held}
        for part in {part for _, part in held}
        if (n, part) not in held
    )


def _listed(amiss: Mapping[str, set[str]]) -> str:
    """What of :func:`_amiss` there is, in words; empty if nothing."""
    names = [f"{what} {name}" for what, found in amiss.items() for name in sorted(found)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _class_of(folder: Path):
    """The class of transformers that config.json names; one for its kind of language models if it names none."""
    transformers, config = stock(), read_config(folder)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    seeing = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (seeing if type(config) in seeing else transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
