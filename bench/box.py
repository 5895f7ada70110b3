"""A box of its own process, for the scripts beside this file."""

import subprocess
import sys
from pathlib import Path


class Box:
    def __init__(self, build, folder, *arguments, log=None, environment=None):
        """Listens at a free port of loopback. `log`: a file for its log, else it goes where this
        process's errors go. Ends the process if the box does not start, which says why."""
        self.process = subprocess.Popen(
            [build / "bin/phub", "serve", "--listen", "127.0.0.1:0", "--socket-dir", folder, *arguments],
            stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        line = next((line for line in self.process.stdout if line.startswith("listening on")), None)
        if line is None:
            sys.exit(f"the box did not start: {Path(log.name).read_text() if log else 'why is above'}")
        self.address = line.split()[-1]  # with https://, if it speaks TLS

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.process.terminate()
        self.process.wait()
