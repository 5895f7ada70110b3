"""The command `phub`: `phub run` is here, and every other command is the box's program."""

from __future__ import annotations

import os
import sys

from phub import _library, errors
from phub.run import main as run


def main() -> int:
    """`phub run …`, or the box's program with the same arguments."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["run"]:
            return run(arguments[1:])
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
