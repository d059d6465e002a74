"""Train or evaluate what a config describes; see `tools/train.sh`. For changes, give `main` your own trainer class."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.commands.train import main

if __name__ == "__main__":
    main()
