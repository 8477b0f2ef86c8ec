"""Read a text and tokenize it with the tokenizer of a checkpoint."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint_files import Checkpoint
from ...checkpoint_files.folder import CONFIG, COPIED
from ...checkpoint_files.private import private_folder
from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import checkpoint_of, quiet, read_config, stock

MAX_TEXT = 2**30  # largest accepted text, in bytes


def read_text(path: Path, option: str = "--text") -> tuple[str, str]:
    """Return the text of a UTF-8 file and the sha256 of its bytes.

    Raises:
        RequestError: the file cannot be read, is not UTF-8, or is larger than MAX_TEXT; the message starts
            with ``option``.
    """
    try:
        if path.stat().st_size > MAX_TEXT:
            raise RequestError(
                f"{option}: expected at most {MAX_TEXT} bytes, got {path.stat().st_size}; use a part of it"
            )
        return decoded(path.read_bytes())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{option}: expected UTF-8 in {path}, got an invalid byte at byte {error.start}"
        ) from None
    except OSError as error:
        raise RequestError(f"{option}: expected a readable file, got {path}: {error.strerror}") from error


def decoded(data: bytes) -> tuple[str, str]:
    """Decode a UTF-8 text; return it with the sha256 of its bytes."""
    return data.decode(), hashlib.sha256(data).hexdigest()


def tokens_of(folder: Path, text: str, *, samples: int, length: int) -> Tensor:
    """Return the first tokens of ``text`` as ``[samples, length]``, from the tokenizer in ``folder``.

    Special tokens and padding are left out, because they would count as text. A short text gives fewer
    samples.

    Raises:
        CheckpointError: the folder has no tokenizer that transformers can open without running its code.
        RequestError: ``samples`` or ``length`` is not a positive count, or the text is too short for one
            sample.
    """
    require_counts(samples, length)
    return first_tokens(tokenizer_of(folder), text, samples=samples, length=length)


def require_counts(samples: int, length: int) -> None:
    """Raise RequestError unless both are positive counts."""
    for name, value in (("samples", samples), ("length", length)):
        if type(value) is not int or value < 1:
            raise RequestError(f"--{name}: expected a positive count, got {value!r}")


def first_tokens(tokenizer: Callable, text: str, *, samples: int, length: int) -> Tensor:
    """Return the first tokens of a text, as :func:`tokens_of`, from a tokenizer that is already open.

    Raises:
        RequestError: the text is too short for one sample.
    """
    wanted = samples * length
    read = 8 * wanted  # characters to tokenize; most texts have fewer than 8 per token
    while (
        len(tokens := tokenizer(text[:read], add_special_tokens=False, verbose=False)["input_ids"]) <= wanted
    ):
        if read >= len(text):
            break
        read *= 4
    whole = min(samples, len(tokens) // length)
    if not whole:
        raise RequestError(
            f"--text: expected at least length={length} tokens, got {len(tokens)}; use a longer text"
        )
    return torch.tensor(tokens[: whole * length]).view(whole, length)


def tokenizer_of(source: Path | Checkpoint):
    """Let transformers open a checkpoint's tokenizer from a copy of the validated files.

    Raises:
        CheckpointError: there is no tokenizer, or transformers cannot open it without running code from
            the folder.
    """
    transformers = stock()
    place = source.folder if isinstance(source, Checkpoint) else source
    if not any((place / name).is_file() for name in COPIED if "token" in name or "vocab" in name):
        raise CheckpointError(
            f"{place}: expected the model's own tokenizer, to read the text, got none; copy it there"
        )
    checkpoint = checkpoint_of(source)
    config, files = read_config(checkpoint), {file.name: file.read() for file in checkpoint.copied}
    try:
        with quiet(), private_folder(files) as folder:
            return transformers.AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # for a bad file, tokenizers raises Exception itself
        named = checkpoint.config.get("tokenizer_class")
        if (
            named is not None and "tokenizer_config.json" not in files
        ):  # only then transformers reads this key
            raise CheckpointError(
                f"{CONFIG}: tokenizer_class: expected a tokenizer of transformers, got {str(named)[:80]}; "
                "copy the model's tokenizer_config.json there"
            ) from error
        raise CheckpointError(
            f"{', '.join(files)}: expected a tokenizer that transformers opens, got {type(error).__name__}: "
            f"{str(error)[:200]}; copy the original model's files"
        ) from error
