"""Make runs resumable: record the settings of a run in its folder, and compare them when it resumes."""

from collections.abc import Mapping
from pathlib import Path

from attnlib.checkpoint_files.plain_json import dump, parse_object
from attnlib.convert.checkpoint.writing import write_file

SETTINGS = "settings.json"


def claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Start a run with these settings in ``folder``, or resume one that was started with the same settings.

    Raises:
        ValueError: the run in the folder has other settings, or its settings file is not JSON.
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
                f"{name}: expected {expected!r}, as in the run that was started in {folder}, got {got!r}; "
                "give the same options, another --out, or delete the folder"
            )
