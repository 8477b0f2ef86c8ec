"""The compile check, for people: ``check.py`` says what it does."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this folder there, whose modules are those of a package in the folder above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from compiled.check import main

    raise SystemExit(main())
