"""Find the texts that a result has seen: those that calibrated it, or that it was fine-tuned on."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...checkpoint_files.folder import SourceFile
from ...checkpoint_files.plain_json import parse_object
from ..checkpoint.errors import CheckpointError
from ..checkpoint.report import REPORT
from ..text.mixture import Text

REPORTS = (REPORT, "finetune_report.json")
MAX_REPORT = 2**26  # largest accepted size of a report, in bytes


def seen_texts(result: Path, texts: Sequence[Text]) -> list[str]:
    """Return the names of the texts whose sha256 a report in ``result`` lists; none without a report."""
    known: set[str] = set()
    for name in REPORTS:
        with suppress(CheckpointError):
            report = parse_object(SourceFile.at(result / name, limit=MAX_REPORT).read(), name)
            settings = report.get("settings")
            calibration = settings.get("calibration") if isinstance(settings, dict) else None
            known |= {*_strings(calibration), *_strings(report.get("text_sha256_by_file"))}
    found = [x.name for x in texts if hashlib.sha256(x.calibration.encode()).hexdigest() in known]
    return [*dict.fromkeys(found)]


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _strings(part)
