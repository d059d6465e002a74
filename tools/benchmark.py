"""Measure the pipeline beside its peers and limits: `python tools/benchmark.py loader`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
