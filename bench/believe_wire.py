"""Plain sockets between two hosts of an emulated rack (scripts/rack), for bench/believe: what a byte
costs the processors, whatever the rate of the link."""

import os
import socket
import time

PORT = 7717
BYTES = 2 << 30
WRITE = 32768  # a chunk
WAIT_S = 20


def say(what, began):
    print(f"{what} {(time.process_time() - began) / BYTES * 1e9:.4f} ns", flush=True)


def receive():
    with socket.create_server(("0.0.0.0", PORT)) as listener:
        connection, _ = listener.accept()
    buffer = memoryview(bytearray(WRITE))
    left, began = BYTES, time.process_time()
    while left > 0:
        got = connection.recv_into(buffer)
        if got == 0:
            raise SystemExit("the sender ended early")
        left -= got
    say("received", began)
    connection.close()


def send():
    address = os.environ["RACK_BOX_ADDRESSES"].split()[0]
    until = time.monotonic() + WAIT_S
    while True:
        try:
            connection = socket.create_connection((address, PORT))
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    data = memoryview(bytearray(WRITE))
    began = time.process_time()
    for _ in range(BYTES // WRITE):
        connection.sendall(data)
    say("sent", began)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # until the receiver has everything
