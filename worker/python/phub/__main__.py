"""The command `phub`: `run` and `tune` are here, every other command is the box's program."""

from __future__ import annotations

import os
import sys

from phub import _library, errors
from phub.run import main as run
from phub.tune import main as tune


def main() -> int:
    """`phub run …`, `phub tune …`, or the box's program with the same arguments."""
    arguments = sys.argv[1:]
    try:
        for name, command in (("run", run), ("tune", tune)):
            if arguments[:1] == [name]:
                return command(arguments[1:])
        program = _library.find_program()
    except errors.Error as error:
        print(f"phub: {error}", file=sys.stderr)
        return 1
    return os.execv(program, [program, *arguments])


def zerocompute() -> int:
    """The benchmark of the same name, with the same arguments."""
    try:
        program = _library.find_program("zerocompute")
    except errors.Error as error:
        print(f"zerocompute: {error}", file=sys.stderr)
        return 1
    return os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
