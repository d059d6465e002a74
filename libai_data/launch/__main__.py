"""`python -m libai_data.launch` is `libai-data launch`."""

import sys

from libai_data.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
