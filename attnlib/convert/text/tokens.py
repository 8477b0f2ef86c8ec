"""A text, and its tokens by a checkpoint's own tokenizer."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint_files import Checkpoint
from ...checkpoint_files.folder import COPIED
from ...checkpoint_files.private import private_folder
from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import checkpoint_of, quiet, read_config, stock

MAX_TEXT = 2**30  # bytes


def read_text(path: Path) -> tuple[str, str]:
    """The text of a UTF-8 file, and the sha256 of its bytes.

    Raises:
        RequestError: it cannot be read, is no UTF-8, or larger than a text can be; names it as ``--text``.
    """
    try:
        if path.stat().st_size > MAX_TEXT:
            raise RequestError(
                f"--text: expected at most {MAX_TEXT} bytes, got {path.stat().st_size}; a part is enough"
            )
        return decoded(path.read_bytes())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"--text: expected UTF-8 in {path}, got something else at byte {error.start}"
        ) from None
    except OSError as error:
        raise RequestError(f"--text: expected a file to read, got {path}: {error.strerror}") from error


def decoded(data: bytes) -> tuple[str, str]:
    """A text, and the sha256 of its bytes."""
    return data.decode(), hashlib.sha256(data).hexdigest()


def tokens_of(folder: Path, text: str, *, samples: int, length: int) -> Tensor:
    """The first tokens of ``text`` as ``[samples, length]``, by the tokenizer in a checkpoint's folder.

    No special tokens and no padding, which would count as text. A text that ends before gives fewer samples.

    Raises:
        CheckpointError: the folder has no tokenizer that transformers opens without running code from the
        folder. RequestError: no count, or a text that is too short for one sample.
    """
    for name, value in (("samples", samples), ("length", length)):
        if type(value) is not int or value < 1:
            raise RequestError(f"--{name}: expected a positive count, got {value!r}")
    tokenizer = tokenizer_of(folder)
    wanted = samples * length
    read = 8 * wanted  # characters: most texts have fewer in a token
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
    """The tokenizer in a checkpoint's folder, as transformers opens it: from a copy of the checked files
    alone.

    Raises:
        CheckpointError: there is none, or transformers does not open it without running code from the folder.
    """
    transformers = stock()
    place = source.folder if isinstance(source, Checkpoint) else source
    if not any((place / name).is_file() for name in COPIED if "token" in name or "vocab" in name):
        raise CheckpointError(
            f"{place}: expected the model's own tokenizer, for the text, got none; copy it there"
        )
    checkpoint = checkpoint_of(source)
    config, files = read_config(checkpoint), {file.name: file.read() for file in checkpoint.copied}
    try:
        with quiet(), private_folder(files) as folder:
            return transformers.AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # what tokenizers raises of a bad file has no narrower class
        raise CheckpointError(
            f"tokenizer.json: expected one that transformers opens: {str(error)[:200]}"
        ) from error
