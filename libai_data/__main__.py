"""`python -m libai_data COMMAND ...` is `libai-data COMMAND ...`."""

import sys

from libai_data.commands import main

if __name__ == "__main__":
    sys.exit(main())
