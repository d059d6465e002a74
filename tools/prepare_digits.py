"""Write scikit-learn's handwritten digits as an image folder: `python tools/prepare_digits.py data/digits`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.sources.digits import main

if __name__ == "__main__":
    main()
