"""Compare two checkpoint folders on texts: ``python score_texts.py SOURCE RESULT FOLDER``.

FOLDER has a folder of text files for each kind; the first two windows of 512 tokens of each file are read.
The result is both perplexities and the KL divergence of each kind, the largest divergence first.
"""

import sys
from pathlib import Path

import torch

from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.check.by_text import lines_by_text
from attnlib.convert.check.comparison import compare
from attnlib.convert.checkpoint.errors import RequestError
from attnlib.convert.text.tokens import tokens_of

WINDOWS, LENGTH = 2, 512

if __name__ == "__main__":
    source, result, folder = map(Path, sys.argv[1:])
    windows, names = [], []
    for path in sorted(folder.glob("*/*.txt")):
        try:
            found = tokens_of(source, path.read_text(), samples=WINDOWS, length=LENGTH)
        except RequestError as error:
            print(f"{path}: {error}")
            continue
        windows.append(found)
        names += [path.parent.name] * len(found)
    measures = compare(read_folder(source), read_folder(result), torch.cat(windows), names=names)
    print("\n".join(lines_by_text(measures)))
