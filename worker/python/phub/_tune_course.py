"""The course of a tuning: what is shown of it, and what is kept of it in a file."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from phub._control import RoundLoss
from phub._decisions import Decisions, Discard, Event, Fork
from phub._search import Values
from phub._trials import judge
from phub.errors import InvalidError

_MOST_GONE = 5  # branches that are known after they were discarded


@dataclass
class Line:
    """What is shown of a branch."""

    branch: int
    values: Values
    clocks: int = 0
    losses: list[float] = field(default_factory=list)  # the latest
    idle: str = "waits"  # what it does when it does not run; or it is a copy
    state: str = "waits"  # the same; runs; gone; and which is the best

    MOST = 640  # losses that are kept

    def take(self, loss: float) -> None:
        """A round of the branch."""
        self.clocks += 1
        self.losses.append(loss)
        del self.losses[: -self.MOST]

    def cells(self) -> Sequence[str]:
        """As text: branch, values, clocks, loss, speed, state."""
        verdict = judge(self.losses)
        loss = f"{self.losses[-1]:.4g}" if self.losses else "-"
        speed = f"{verdict.speed:.2g}" if self.losses and math.isfinite(verdict.speed) else "-"
        return (
            str(self.branch),
            values_text(self.values) or "as it began",
            str(self.clocks),
            loss,
            speed,
            self.state,
        )


HEAD = ("BRANCH", "VALUES", "CLOCKS", "LOSS", "FALLS", "STATE")


def values_text(values: Mapping[str, float]) -> str:
    """Such as "lr 0.01, momentum 0.9"."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


class Log:
    """A file with an object of JSON on each line: what was done, and each round's loss.

    It is appended to: what earlier tunings have left stays.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        try:
            self._file = path.open("a") if path else None
        except OSError as error:
            raise InvalidError(f"--log {path}: {error.strerror}") from None

    def add(self, kind: str, **more: Any) -> None:
        """Numbers that are not finite become null."""
        if self._file is None:
            return
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in more.items()
        }
        print(json.dumps({"kind": kind, **row}), file=self._file, flush=True)

    def close(self) -> None:
        """At the end."""
        if self._file:
            self._file.close()


class Course:
    """Follows a driver."""

    def __init__(self, log: Log, out: TextIO, job: str, root: int) -> None:
        self.round = 0
        self._log, self._out, self._job = log, out, job
        self._is_terminal = out.isatty()
        self.lines = {root: Line(root, {})}
        self._best: tuple[int, Values] | None = None

    def hear(self, heard: RoundLoss) -> None:
        """The loss of a round."""
        self.round = heard.round
        if heard.branch in self.lines:
            self.lines[heard.branch].take(heard.loss)
        self._log.add(
            "loss", round=heard.round, branch=heard.branch, loss=heard.loss, ranks=heard.ranks
        )

    def tell(self, event: Event) -> None:
        """What the driver did."""
        at, request = event.round, event.request
        if isinstance(request, Fork):
            assert event.branch is not None
            values = self.lines[request.parent].values | request.values
            idle = "waits" if request.values else "copy"
            self.lines[event.branch] = Line(event.branch, values, idle=idle, state=idle)
            self._log.add(
                "fork", round=at, branch=event.branch, parent=request.parent, values=request.values
            )
            what = values_text(request.values) or "a copy to go back to"
            self._say(f"round {at}: branch {event.branch}, of {request.parent}: {what}")
        elif isinstance(request, Discard):
            self.lines[request.branch].state = "gone"
            self._log.add("discard", round=at, branch=request.branch)
            self._say(f"round {at}: branch {request.branch} is discarded")
        else:
            verdict = judge(event.losses)
            self._log.add(
                "ran",
                round=at,
                branch=request.branch,
                clocks=len(event.losses),
                course=verdict.course.value,
                loss=verdict.loss,
                speed=verdict.speed,
            )
            self._say(
                f"round {at}: branch {request.branch} ran {len(event.losses)} clocks, loss "
                f"{verdict.loss:.4g}, {verdict.course.value}"
            )

    def rewound(self, root: int) -> None:
        """The job has gone on from a checkpoint, with this branch, and the driver begins anew."""
        for line in self.lines.values():
            line.state = "gone"
        values = self.lines[root].values if root in self.lines else {}
        self.lines[root] = Line(root, values)
        self._log.add("rewound", round=self.round, branch=root)
        self._say(f"round {self.round}: the job has gone on from a checkpoint, with branch {root}")

    def decided(self, decisions: Decisions, running: int) -> None:
        """After the driver has decided: what runs, and what is the best."""
        for line in self.lines.values():
            if line.state != "gone":
                line.state = "runs" if line.branch == running else line.idle
        found = decisions.best
        best = (found.branch, found.values) if found else None
        if best and best != self._best:
            branch, values = best
            self._log.add("chosen", round=self.round, branch=branch, values=values)
            self._say(f"round {self.round}: branch {branch} is chosen: {values_text(values)}")
        self._best = best
        chosen = self.lines.get(best[0]) if best else None
        if chosen and chosen.state != "gone":
            chosen.state += ", best"
        gone = [line.branch for line in self.lines.values() if line.state == "gone"]
        for branch in gone[:-_MOST_GONE]:
            del self.lines[branch]

    def show(self) -> None:
        """On a terminal, what there is now in place of what there was."""
        if self._is_terminal:
            height = shutil.get_terminal_size().lines - 1
            text = "\n".join(self.table()[:height])
            print(f"\x1b[H\x1b[2J{text}", file=self._out, flush=True)

    def table(self) -> list[str]:
        """A head, and a line for each branch."""
        rows = [HEAD, *(line.cells() for line in self.lines.values())]
        widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
        best = values_text(self._best[1]) if self._best else "none yet"
        return [
            f"job {self._job}, round {self.round}; best: {best}",
            *(
                "  ".join(
                    cell.ljust(width) if at in (1, 5) else cell.rjust(width)
                    for at, (cell, width) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
                for row in rows
            ),
        ]

    def end(self, why: str) -> None:
        """The tuner does no more."""
        self._log.add("end", round=self.round, why=why)
        self._log.close()
        self.show()
        best = values_text(self._best[1]) if self._best else "nothing was found"
        print(f"round {self.round}: {why}; best: {best}", file=self._out, flush=True)

    def _say(self, text: str) -> None:
        if not self._is_terminal:
            print(text, file=self._out, flush=True)
