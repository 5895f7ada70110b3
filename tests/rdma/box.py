"""In the box's machine: runs the server, and the commands that the worker's machine sends.

A command has the server's process in $SERVER, and in $PYTHON what it can run programs with. Ends as the server does, when it gets SIGTERM.
"""

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading

PORT = 7790


class Command(socketserver.StreamRequestHandler):
    def handle(self):
        command = json.loads(self.rfile.readline())
        done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
        answer = [done.returncode, done.stdout, done.stderr]
        self.wfile.write(json.dumps(answer).encode())


def main():
    # The signal is for the whole group; the server decides when all is over.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    server = subprocess.Popen(["build/release/bin/phub", "serve", "--listen", "*:7717", "--insecure"])
    os.environ |= {"SERVER": str(server.pid), "PYTHON": sys.executable}
    socketserver.ThreadingTCPServer.daemon_threads = True
    commands = socketserver.ThreadingTCPServer(("10.77.0.1", PORT), Command)
    threading.Thread(target=commands.serve_forever, daemon=True).start()
    status = server.wait()
    if status != 0:
        print(f"the server ended with status {status}")
    sys.stdout.flush()
    os._exit(0 if status == 0 else 1)


if __name__ == "__main__":
    main()
