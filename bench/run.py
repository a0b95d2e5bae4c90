"""`python bench/run.py` from any folder: the same as `python -m bench` in the repository's root."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
runpy.run_module("bench", run_name="__main__", alter_sys=True)
