"""What the scripts that draw have in common. Needs python3-matplotlib."""

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

try:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker  # noqa: F401
except ImportError:
    sys.exit("matplotlib is not here: apt-get install python3-matplotlib")

# Distinct without colours too, by their lightness, and for the colour-blind (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
MARKERS = "os^Dv*x"


class Failure(Exception):
    pass


@contextlib.contextmanager
def reading(path, writer):
    """A block that reads the file, which `writer` has written. What is wrong with the file is a Failure."""
    try:
        yield
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        said = error if isinstance(error, ValueError) else repr(error)  # repr() of a UnicodeDecodeError has the whole file
        raise Failure(f"{path} is no file of {writer}: {said}") from None


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None


def save(figure, path):
    make_folder(path.parent)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    pyplot.close(figure)
    print(path, flush=True)


def points(line, value):
    """x, median, and the distances to the least and to the most."""
    xs = sorted(line)
    values = [[value(row) for row in line[x]] for x in xs]
    middle = [statistics.median(v) for v in values]
    return xs, middle, [[m - min(v) for m, v in zip(middle, values)],
                        [max(v) - m for m, v in zip(middle, values)]]


def draw_line(axes, number, name, line, value, **style):
    xs, ys, spread = points(line, value)
    style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)],
             "label": name, "capsize": 3, "linewidth": 1.8, "markersize": 6} | style
    axes.errorbar(xs, ys, yerr=spread if any(map(any, spread)) else None, **style)


def finish(axes, title, xlabel, ylabel):
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend(figure, axes):
    """Beside the picture, where it hides nothing."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def options(doc, written_by=None, *, several=True):
    """The options of every script: what it reads, and where and how it draws."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if written_by:
        parser.add_argument("files" if several else "file", nargs="+" if several else None, type=Path,
                            help=f"written by {written_by}")
        parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder (default: this one)")
    return parser


def run(main):
    """Ends the script with the message of a Failure."""
    try:
        main()
    except Failure as failure:
        sys.exit(f"{Path(sys.argv[0]).name}: {failure}")
