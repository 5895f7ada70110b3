"""In the box's machine: what the kernel says of the server. Prints JSON.

  box_probe.py memory         pages of the server by mapping with a NUMA policy
  box_probe.py cores          CPUs that each core's thread may run on, and the CPUs of each node
  box_probe.py nics           the node of each RDMA device
  box_probe.py pages RANGES   the nodes of the server's pages: of each [first, last] byte, as JSON
  box_probe.py calls SECONDS  system calls of the cores' threads by kind (strace)
"""

import collections
import ctypes
import glob
import json
import os
import re
import subprocess
import sys

SERVER = f"/proc/{os.environ['SERVER']}"
MOVE_PAGES = 279  # of x86-64; libc has no function for it
POST_SEND, NOTIFY = 28, 23  # commands of ib_uverbs that a provider without a device of its own writes


def memory():
    mappings = []
    with open(f"{SERVER}/numa_maps") as file:
        for line in file:
            policy = re.match(r"\S+ prefer(?: \(many\))?:(\d+) ", line)
            if policy is None:
                continue
            size = int(re.search(r"kernelpagesize_kB=(\d+)", line)[1]) * 1024
            pages = {n: int(count) * size for n, count in re.findall(r" N(\d+)=(\d+)", line)}
            mappings.append({"node": policy[1], "bytes": pages})
    return mappings


def core_threads():
    threads = {}
    for task in glob.glob(f"{SERVER}/task/*"):
        with open(f"{task}/comm") as file:
            name = file.read().strip()
        if name.startswith("phub-core-"):
            threads[name] = task
    return threads


def cores():
    allowed = {}
    for name, task in core_threads().items():
        with open(f"{task}/status") as file:
            allowed[name] = re.search(r"Cpus_allowed_list:\s*(\S+)", file.read())[1]
    nodes = {}
    for path in glob.glob("/sys/devices/system/node/node*/cpulist"):
        with open(path) as file:
            nodes[path.split("/")[-2]] = file.read().strip()
    return {"allowed": allowed, "nodes": nodes}


def nics():
    nodes = {}
    for path in glob.glob("/sys/class/infiniband/*"):
        with open(f"{path}/parent") as file:
            device = file.read().strip()
        # The network device is virtio's, below the one on PCI.
        with open(f"/sys/class/net/{device}/device/../numa_node") as file:
            nodes[os.path.basename(path)] = int(file.read())
    return nodes


def pages(ranges):
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.sysconf("SC_PAGE_SIZE")
    answer = []
    for first, last in ranges:
        addresses = range(first // size * size, last + 1, size)
        wanted = (ctypes.c_void_p * len(addresses))(*addresses)
        nodes = (ctypes.c_int * len(addresses))()
        # Without target nodes move_pages() moves nothing and tells where each page is.
        if libc.syscall(MOVE_PAGES, int(os.environ["SERVER"]), ctypes.c_ulong(len(addresses)), wanted, None, nodes, 0) != 0:
            raise OSError(ctypes.get_errno(), "move_pages")
        answer.append(sorted(set(nodes)))
    return answer


def kind_of(line):
    call = re.match(r'\d+ +(\w+)\((?:\d+<([^>]*)>)?(?:, "((?:\\x..)*))?', line)
    if call is None:
        return None  # the end of a call, or a signal
    file = re.sub(r"\\x(..)", lambda code: chr(int(code[1], 16)), call[2] or "")
    name, data = call[1], call[3] or ""
    if name == "write" and "uverbs" in file:
        command = int(data[2:4], 16)
        return {POST_SEND: "doorbell", NOTIFY: "notify"}.get(command, f"uverbs command {command}")
    if name == "ioctl" and "uverbs" in file:
        return "uverbs ioctl"
    if name == "write" and "eventfd" in file:
        return "wake-up"
    if name == "read" and "infinibandevent" in file:
        return "completion event"
    return name


def calls(seconds):
    tasks = [os.path.basename(task) for task in core_threads().values()]
    trace = "/tmp/phub-calls"
    command = ["timeout", "-s", "INT", seconds, "strace", "-qq", "-xx", "-y", "-s", "4", "-o", trace]
    for task in tasks:
        command += ["-p", task]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    with open(trace) as file:
        kinds = collections.Counter(filter(None, map(kind_of, file)))
    return kinds


def main():
    if sys.argv[1] == "memory":
        result = memory()
    elif sys.argv[1] == "cores":
        result = cores()
    elif sys.argv[1] == "nics":
        result = nics()
    elif sys.argv[1] == "pages":
        result = pages(json.loads(sys.argv[2]))
    else:
        result = calls(sys.argv[2])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
