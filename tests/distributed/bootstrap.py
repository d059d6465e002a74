"""Runs test scripts as one rank: `bootstrap.py SCRIPT ARGS...`, or `bootstrap.py --pool SOCKET` (see pool.py).

On SIGUSR2 the rank prints the stacks of its threads, at any moment, also when it hangs inside OneFlow.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import runpy
import signal
import sys
import traceback
from multiprocessing.connection import Client


def main() -> None:
    """Run the script named by the first argument as ``__main__``, or those that a pool asks for."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    # Each line in one piece: the ranks share the output, and unbuffered prints of theirs would mingle.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if sys.argv[1] == "--pool":
        serve(sys.argv[2])
    elif os.environ.get("LIBAI_DATA_TEST_END_ON_ERROR") == "0":
        run(sys.argv[1], sys.argv[2:])
    elif code := code_of(sys.argv[1], sys.argv[2:]):
        end(code)


def run(script: str, arguments: list[str]) -> None:
    """Run a script as Python would."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def code_of(script: str, arguments: list[str]) -> int:
    """Run a script and return its exit code; what it raises is printed."""
    try:
        run(script, arguments)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        print(f"rank {os.environ.get('RANK', '?')} raised:", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


def serve(address: str) -> None:
    """Run the scripts of a pool until it closes the connection."""
    import oneflow as flow

    from libai_data.mesh.current import set_mesh

    flow.env.get_rank()
    gc.freeze()  # What is imported stays.
    environment, folder = dict(os.environ), os.getcwd()
    with Client(address) as pool:
        while True:
            try:
                script, arguments, output = pool.recv()
            except (EOFError, OSError):
                end(0)
            redirect(output)
            code = code_of(script, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            if code:
                pool.send(code)
                end(code)
            set_mesh(None)
            if "libai.utils.distributed" in sys.modules:
                vars(sys.modules["libai.utils.distributed"])["_DIST_UTIL"] = None  # LiBai's mesh of this script.
            gc.collect()
            # OneFlow's threads read the environment whenever they compute, which crashes while it is changed.
            flow._oneflow_internal.eager.Sync()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            pool.send(code)


def redirect(output: str) -> None:
    """Let this process, and what it starts, write to the end of a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def end(code: int) -> None:
    """End at once: the interpreter's own shutdown would wait for the other ranks, which wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
