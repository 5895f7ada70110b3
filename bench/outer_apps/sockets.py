"""Plain sockets that move the bytes of a round, and compute nothing.

  sockets.py serve PORT BYTES RANKS           in the middle: sends back what it has of all learners
  sockets.py learn HOST PORT BYTES RANK ROUNDS

Each process has a thread for each direction of each connection, and sends on a piece as soon as
every learner has sent that piece.
"""

import socket
import struct
import sys
import threading
import time

PIECE = 1 << 20
BUFFER = 4 << 20  # of a socket; on one machine, where it was the best of 256 KiB to 8 MiB


def tuned(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.getpeername()[0] == "127.0.0.1":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")  # BBR paces
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    return connection


def receive(connection, view):
    """Raises EOFError if the other side has closed."""
    at = 0
    while at < len(view):
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got


def pieces(size):
    return [(at, min(at + PIECE, size)) for at in range(0, size, PIECE)]


class Middle:
    """Learners' arrays, and how many pieces of each have come, over all rounds."""

    def __init__(self, port, size, ranks):
        self.size, self.came = size, [0] * ranks
        self.arrays = [memoryview(bytearray(size)) for _ in range(ranks)]
        self.more = threading.Condition()
        listener = socket.create_server(("0.0.0.0", port))
        threads = []
        for _ in range(ranks):
            connection = tuned(listener.accept()[0])
            rank = struct.unpack("i", connection.recv(4, socket.MSG_WAITALL))[0]
            threads += [threading.Thread(target=each, args=(connection, rank), daemon=True)
                        for each in (self.take, self.give)]
        for thread in threads:
            thread.start()
        for thread in threads[::2]:
            thread.join()

    def take(self, connection, rank):
        try:
            while True:
                for begin, end in pieces(self.size):
                    receive(connection, self.arrays[rank][begin:end])
                    with self.more:
                        self.came[rank] += 1
                        self.more.notify_all()
        except (EOFError, OSError):
            return  # it has left

    def give(self, connection, rank):
        given = 0
        while True:
            for begin, end in pieces(self.size):
                given += 1
                with self.more:
                    self.more.wait_for(lambda: min(self.came) >= given)
                connection.sendall(self.arrays[rank][begin:end])


def learn(host, port, size, rank, rounds):
    address, began = (host, port), time.monotonic()
    while True:
        try:
            connection = tuned(socket.create_connection(address))
            break
        except ConnectionRefusedError:
            if time.monotonic() - began > 60:
                raise
            time.sleep(0.05)
    connection.sendall(struct.pack("i", rank))
    mine, result = bytearray(size), memoryview(bytearray(size))
    for at in range(1, rounds + 1):
        mine[0], mine[-1] = at, rank + 1
        began = time.monotonic()
        sender = threading.Thread(target=connection.sendall, args=(mine,))
        sender.start()
        receive(connection, result)
        sender.join()
        if rank == 0:
            print("SECONDS", time.monotonic() - began, flush=True)
        if (result[0], result[-1]) != (at, rank + 1):
            raise ValueError(f"what came back in round {at} is not what was sent")


if sys.argv[1] == "serve":
    Middle(*(int(word) for word in sys.argv[2:5]))
else:
    learn(sys.argv[2], *(int(word) for word in sys.argv[3:7]))
