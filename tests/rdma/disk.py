"""In one machine: the disk of a box's checkpoints is a file system of its own, of a few MiB. It becomes full under a
training, has room again, and loses power."""

import fcntl
import os
import re
import struct
import subprocess
import time

from machines import expect, job, run_cases, until
from training import Training

MIB = 1 << 20
IMAGE, DISK, LOG = "/tmp/image", "/tmp/disk", "/tmp/server"
EVERY = 20
ELEMENTS = 5000
CHECKPOINT_BYTES = 3 * 4 * ELEMENTS  # at least: parameters and two states
EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2


def make_disk():
    with open(IMAGE, "wb") as image:
        image.truncate(8 * MIB)
    os.mkdir(DISK)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", IMAGE], check=True)
    mount()


def mount():
    subprocess.run(["mount", "-t", "ext4", "-o", "loop", IMAGE, DISK], check=True)


def lose_power():
    """What has not been synced is lost; the journal is cut off wherever it is."""
    with open(f"{DISK}/never-synced", "wb") as file:
        file.write(b"x" * 100_000)
    folder = os.open(DISK, os.O_RDONLY)
    fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    os.close(folder)


def room():
    disk = os.statvfs(DISK)
    return disk.f_bavail * disk.f_bsize


def leave_room(bytes):
    if room() > bytes:
        with open(f"{DISK}/ballast", "ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), room() - bytes)


def serve():
    with open(LOG, "ab") as log:
        return subprocess.Popen(["build/release/bin/phub", "serve", "--listen", "10.77.0.1:7717", "--insecure",
                                 "--checkpoints", DISK, "--checkpoint-every", str(EVERY)],
                                stdout=log, stderr=log)


def said(pattern):
    with open(LOG) as log:
        return re.search(pattern, log.read())


def durable_round():
    return job("disk").get("durable_round", 0)


def saves_another():
    before = durable_round()
    until(lambda: durable_round() > before, 60, f"a checkpoint after round {before} is durable")


def disk():
    global server
    run = Training("disk", 2, 10_000, keys=[{"name": "a", "elements": ELEMENTS}], optimizer="adam",
                   initial="broadcast", reduction="mean", hyper={"lr": 0.01})
    for rank in range(2):
        run.start(rank)
    until(lambda: job("disk"), 30, "the job is there")
    saves_another()

    def is_full():
        leave_room(CHECKPOINT_BYTES // 2)  # also of what a checkpoint that is removed leaves
        return said("was not saved, the last that is remains round ([0-9]+): .*No space left on device")

    stood = int(until(is_full, 60, "a checkpoint finds no room")[1])
    run.goes_on(3 * EVERY, 60)
    expect(durable_round() == stood > 0, f"round {durable_round()} is durable on a full disk, after {stood}")
    subprocess.run(["build/release/bin/phub", "checkpoint", "verify", DISK], check=True)

    os.remove(f"{DISK}/ballast")
    saves_another()
    saves_another()

    promised = durable_round()
    lose_power()
    run.goes_on(3 * EVERY, 60)  # without a disk, too
    server.kill()
    server.wait()
    run.kill()
    subprocess.run(["umount", DISK], check=True)
    mount()
    messages = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
    expect("recovery complete" in messages, "the file system was not mounted from its journal")
    lost = f"{DISK}/never-synced"
    expect(not os.path.exists(lost) or os.path.getsize(lost) == 0, "power was not lost: what was never synced is there")

    server = serve()
    until(lambda: said(r"(?s)listening.*listening"), 30, "the server is there again")
    alive = len(run.workers)
    for rank in range(2):
        run.start(rank)
    until(lambda: job("disk"), 30, "the job is there again")
    expect(durable_round() >= promised, f"round {promised} was durable, and it is restored from {durable_round()}")
    saves_another()
    run.finish()
    run.check(alive)


def case():
    try:
        disk()
    finally:
        with open(LOG) as log:
            print(log.read())


make_disk()
server = serve()
run_cases({"disk": case}, ["disk"])
