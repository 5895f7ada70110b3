"""What a program says that ends because of another process: one line.

Which of its lines happened to wait when a rank or the box was lost tells nothing, and the traceback
of every other rank hides the message.
"""

from __future__ import annotations

import sys
from types import TracebackType

from phub.errors import FencedError, RankLostError, UnavailableError

_OF_OTHERS = (RankLostError, FencedError, UnavailableError)


def say_losses_in_a_line() -> None:
    """From now on, unless the program or a debugger has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not isinstance(error, _OF_OTHERS):
        sys.__excepthook__(kind, error, traceback)
        return
    text = " ".join(str(error).split())
    print(f"phub.{kind.__name__}: {text}{_place(traceback)}", file=sys.stderr)


def _place(traceback: TracebackType | None) -> str:
    """The program's own line; "": it has none."""
    place = ""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__") == "__main__":
            place = f" ({frame.f_code.co_filename}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return place
