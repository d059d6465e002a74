"""Runs a test script as one rank: `bootstrap.py SCRIPT ARGS...`, see launcher.py.

On SIGUSR2 the rank prints the stacks of its threads, at any moment, also when it hangs inside OneFlow.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback


def main() -> None:
    """Run the script named by the first argument as ``__main__``."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    # Each line in one piece: the ranks share the output, and unbuffered prints of theirs would mingle.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(script)
    if os.environ.get("LIBAI_DATA_TEST_END_ON_ERROR") == "0":
        runpy.run_path(script, run_name="__main__")
        return
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if not end.code:
            raise
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _end(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        print(f"rank {os.environ.get('RANK', '?')} raised:", file=sys.stderr)
        traceback.print_exc()
        _end(1)


def _end(code: int) -> None:
    # The interpreter's own shutdown would wait for the other ranks, which wait for this one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
