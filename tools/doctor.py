"""Look at every rank before training what a config describes; see `tools/train.sh` and `libai-data doctor --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
