"""Tokenize a corpus, with LiBai's flags: `python tools/preprocess_data.py --input corpus.jsonl --output-prefix ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.commands.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
