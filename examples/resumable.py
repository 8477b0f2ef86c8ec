"""A run that can stop anywhere and go on: its folder knows with which settings it was begun."""

from collections.abc import Mapping
from pathlib import Path

from attnlib.checkpoint_files.plain_json import dump, parse_object
from attnlib.convert.checkpoint.writing import write_file

SETTINGS = "settings.json"


def claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Begin a run with these settings in ``folder``, or go on with one that was begun with the same.

    Raises:
        ValueError: the folder's run has other settings, or settings that are no JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.exists():
        write_file(folder, SETTINGS, dump(settings))
    begun = parse_object(path.read_bytes(), str(path))
    for name in sorted({*begun, *settings}):
        expected, got = begun.get(name), settings.get(name)
        if expected != got:
            raise ValueError(
                f"{name}: expected {expected!r}, with which the run in {folder} was begun, got {got!r}; "
                "give the same options, another --out, or delete the folder"
            )
