"""`python -m libai_data.commands.doctor` is `libai-data doctor`, as the launcher starts it."""

import sys

from libai_data.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
