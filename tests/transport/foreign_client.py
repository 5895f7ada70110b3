#!/usr/bin/python3
"""A worker over TCP, written from the documents of transport/ and nothing else: it holds
them to the code.

    foreign_client.py PHUB

Starts a server of two NUMA nodes, trains in a few jobs with three ranks, and compares every bit with
sums and steps computed here. Plain Python, no library.
"""
import http.client, json, random, socket, struct, subprocess, sys, threading, time

RANKS, ROUNDS = 3, 5
FORMAT = {"f32": ("f", 4), "f16": ("e", 2)}
DATA, NULL, INITIAL = 0, 1, 2
SLOT = 32  # elements that a slot is a multiple of


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


class Refused(Exception):
    def __init__(self, status, body):
        super().__init__(f"{status} {body['code']}: {body['detail']}")
        self.status, self.code, self.message = status, body["code"], body["detail"]


class Control:
    """One connection to the control port."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)

    def raw(self, method, path, body=None, ticket=None):
        headers = {"Authorization": f"Bearer {ticket}"} if ticket else {}
        text = None if body is None else json.dumps(body)
        if body is not None:
            headers["Content-Type"] = "application/json"
        self.connection.request(method, path, text, headers)
        answer = self.connection.getresponse()
        return answer, answer.read()

    def call(self, method, path, body=None, ticket=None):
        answer, text = self.raw(method, path, body, ticket)
        if answer.status != 200:
            raise Refused(answer.status, json.loads(text))
        return json.loads(text)


class Queue:
    """One TCP connection: frames both ways."""

    def __init__(self, address, hello):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(hello)
        magic, version, kind, count = struct.unpack("<IIII", self.read(16))
        assert (magic, version) == (0x54554850, 1), "not a phub server"
        payload = self.read(count)
        if kind == 2:
            raise RuntimeError(payload.decode())
        assert kind == 1 and count == 8, (kind, count)
        self.welcome = struct.unpack("<II", payload)
        self.arrived = []

    def read(self, count):
        parts = []
        while count > 0:
            part = self.socket.recv(min(count, 1 << 20))
            if not part:
                raise ConnectionError("the box closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def send(self, frames):
        """frames: (immediate, offset, payload)"""
        for at in range(0, len(frames), 32):
            batch = frames[at:at + 32]
            heads = [struct.pack("<IIQ", imm, len(payload), offset) for imm, offset, payload in batch]
            self.socket.sendall(struct.pack("<II", len(batch) - 1, 0) + b"".join(heads) +
                                b"".join(payload for _, _, payload in batch))

    def frame(self):
        if not self.arrived:
            more, reserved = struct.unpack("<II", self.read(8))
            assert more < 32 and reserved == 0
            heads = [struct.unpack("<IIQ", self.read(16)) for _ in range(more + 1)]
            self.arrived = [(imm, offset, self.read(count)) for imm, count, offset in heads]
        return self.arrived.pop(0)


class Worker:
    def __init__(self, address, spec, rank):
        self.address, self.control, self.name = address, Control(address), spec["name"]
        reply = self.control.call("POST", f"/v1/jobs/{self.name}/join",
                                  {"version": 1, "spec": spec, "rank": rank, "transport": "tcp"})
        self.rank, self.incarnation = reply["rank"], reply["incarnation"]
        self.ticket = reply["offer"]["ticket"]
        self.first_round, self.send_initial = reply["first_round"], reply.get("send_initial", False)
        spec = reply["spec"]
        self.keys, chunk_elements = spec["keys"], spec.get("chunk_elements", 8192)
        self.in_code, self.in_bytes = FORMAT[spec.get("gradient_dtype", "f32")]
        self.out_code, self.out_bytes = FORMAT[spec.get("parameter_dtype", "f32")]
        layout = reply["layout"]
        self.total = layout["total_elements"]
        # Chunks are numbered key by key.
        self.chunks, self.of_key = [], []
        for offset, key in zip(layout["key_offset"], self.keys):
            first = len(self.chunks)
            for begin in range(0, key["elements"], chunk_elements):
                self.chunks.append({"elements": min(chunk_elements, key["elements"] - begin),
                                    "at": offset + begin, "key": len(self.of_key), "in_key": begin})
            self.of_key.append(range(first, len(self.chunks)))
        self.queue_chunks = layout["queue_chunks"]
        for q, chunks in enumerate(self.queue_chunks):
            at = layout["queue_offset"][q] if "queue_offset" in layout else None
            for index, c in enumerate(chunks):
                chunk = self.chunks[c]
                chunk.update(queue=q, index=index, box=chunk["at"] if at is None else at)
                if at is not None:
                    at += -(-chunk["elements"] // SLOT) * SLOT
        self.results = bytearray(self.total * self.out_bytes)
        self.connect(reply["offer"])
        self.stop = threading.Event()
        self.pulse = None
        self.heart = threading.Thread(target=self.beat, args=[spec.get("lease_ms", 3000) / 3000],
                                      daemon=True)
        self.heart.start()

    def connect(self, offer):
        assert offer["transport"] == "tcp" and len(offer["queues"]) == len(self.queue_chunks)
        self.queues = []
        for q, queue in enumerate(offer["queues"]):
            hello = struct.pack("<IIII32sIIIIQQ", 0x54554850, 1, 0, 64, offer["ticket"].encode(), q,
                                len(offer["queues"]), len(self.queue_chunks[q]), 0,
                                self.total * self.in_bytes, self.total * self.out_bytes)
            self.queues.append(Queue(queue["address"], hello))
            assert self.queues[-1].welcome == (self.rank, self.incarnation)

    def credential(self):
        return {"rank": self.rank, "incarnation": self.incarnation}

    def ask(self, action, control=None):
        return (control or self.control).call("POST", f"/v1/jobs/{self.name}/{action}",
                                              self.credential(), self.ticket)

    def beat(self, interval):
        control = Control(self.address)
        while not self.stop.wait(interval):
            try:
                self.pulse = self.ask("heartbeat", control)
            except Refused as refused:
                self.pulse = refused
                return

    def write(self, chunk, kind, round, payload):
        imm = chunk["index"] << 10 | (round & 0xff) << 2 | kind
        self.queues[chunk["queue"]].send([(imm, chunk["box"] * self.in_bytes, payload)])

    def floats_of(self, values, chunk, first, count):
        begin = chunk["in_key"] + first
        return struct.pack(f"<{count}f", *values[chunk["key"]][begin:begin + count])

    def broadcast(self, values):
        """Rank 0's initial parameters: f32; a slot of 16-bit gradients takes them in two parts."""
        if not self.send_initial:
            return
        for chunk in self.chunks:
            n = chunk["elements"]
            parts = [(0, n)] if self.in_bytes == 4 else [(0, n // 2), (n // 2, n - n // 2)]
            for part, (first, count) in enumerate(parts):
                self.write(chunk, INITIAL, part, self.floats_of(values, chunk, first, count))
                if part + 1 < len(parts):  # the slot is free again when the part was taken
                    imm, offset, payload = self.queues[chunk["queue"]].frame()
                    # The results of chunks whose last part has been taken may come in between.
                    while imm & 3 == DATA:
                        self.land(chunk["queue"], imm, offset, payload, 0)
                        imm, offset, payload = self.queues[chunk["queue"]].frame()
                    assert imm == chunk["index"] << 10 | part << 2 | INITIAL and payload == b""

    def land(self, q, imm, offset, payload, round):
        chunk = self.chunks[self.queue_chunks[q][imm >> 10]]
        if "round" in chunk and imm >> 2 & 0xff == chunk["round"] & 0xff:
            return  # once more, after a reconnection
        assert imm & 3 == DATA and imm >> 2 & 0xff == round & 0xff, (imm & 3, imm >> 2 & 0xff, round)
        assert offset == chunk["at"] * self.out_bytes
        assert len(payload) == chunk["elements"] * self.out_bytes
        self.results[offset:offset + len(payload)] = payload
        chunk["round"] = round

    def wait(self, round):
        for q, chunks in enumerate(self.queue_chunks):
            while any(self.chunks[c].get("round", -1) < round for c in chunks):
                imm, offset, payload = self.queues[q].frame()
                self.land(q, imm, offset, payload, round)

    def push(self, key, round, values):
        """values: None for a gradient of zero"""
        for c in self.of_key[key]:
            chunk = self.chunks[c]
            if values is None:
                self.write(chunk, NULL, round, b"")
                continue
            part = values[chunk["in_key"]:chunk["in_key"] + chunk["elements"]]
            self.write(chunk, DATA, round, struct.pack(f"<{len(part)}{self.in_code}", *part))

    def parameters(self, key):
        at, n = self.chunks[self.of_key[key][0]]["at"], self.keys[key]["elements"]
        return struct.unpack_from(f"<{n}{self.out_code}", self.results, at * self.out_bytes)

    def reconnect(self):
        """Closes everything and makes it again: what was not acknowledged is to be sent once more."""
        for queue in self.queues:
            queue.socket.close()
        self.connect(self.ask("reconnect"))

    def close(self, leave=True):
        self.stop.set()
        self.heart.join()
        if leave:
            self.ask("leave")
        for queue in self.queues:
            queue.socket.close()


KEYS = [{"name": "odd", "elements": 1001}, {"name": "one", "elements": 1},
        {"name": "big", "elements": 5000, "lr_scale": 0.5}, {"name": "even", "elements": 256}]


def gradient(rank, round, key, code):
    """Floats as the format has them; None for a gradient of zero."""
    if (rank + round + key) % 5 == 0:
        return None
    some = random.Random(f"{rank} {round} {key}")
    n = KEYS[key]["elements"]
    values = [some.uniform(-2, 2) for _ in range(n)]
    return struct.unpack(f"<{n}{code}", struct.pack(f"<{n}{code}", *values))


def initial(key):
    some = random.Random(f"initial {key}")
    return [f32(some.uniform(-1, 1)) for _ in range(KEYS[key]["elements"])]


def expected(spec):
    """What every rank must see of each key after each round: sums in the order of the ranks, each of
    them, and every product, rounded to f32; then the optimizer."""
    code = FORMAT[spec.get("gradient_dtype", "f32")][0]
    out = FORMAT[spec.get("parameter_dtype", "f32")][0]
    hyper = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, **spec.get("hyper", {})}
    rounds = []
    params = [initial(k) for k in range(len(KEYS))]
    buffers = [[0.0] * key["elements"] for key in KEYS]
    for round in range(1, ROUNDS + 1):
        for change in spec.get("schedule", []):
            if change["round"] == round:
                hyper.update(change["values"])
        seen = []
        for k, key in enumerate(KEYS):
            gradients = [gradient(rank, round, k, code) for rank in range(RANKS)]
            present = [g for g in gradients if g is not None]
            total = [0.0] * key["elements"] if not present else list(present[0])
            for g in present[1:]:
                total = [f32(a + b) for a, b in zip(total, g)]
            if spec.get("reduction") == "mean":  # times float(1/n), null contributions counted
                factor = f32(1.0 / RANKS)
                total = [f32(x * factor) for x in total]
            if spec["optimizer"] == "none":
                values = total
            else:
                decay = f32(hyper["weight_decay"])
                step = f32(-(hyper["lr"] * key.get("lr_scale", 1)))
                momentum = f32(hyper["momentum"])
                p, buffer = params[k], buffers[k]
                if decay != 0:
                    total = [f32(g + f32(decay * x)) for g, x in zip(total, p)]
                buffer[:] = total if round == 1 else [f32(f32(momentum * b) + g)
                                                      for b, g in zip(buffer, total)]
                total = [f32(g + f32(momentum * b)) for g, b in zip(total, buffer)]
                p[:] = [f32(x + f32(step * g)) for x, g in zip(p, total)]
                values = p
            seen.append(struct.unpack(f"<{len(values)}{out}",
                                      struct.pack(f"<{len(values)}{out}", *values)))
        rounds.append(seen)
    return rounds


def train(address, spec, reconnect_in=0):
    wanted, failures = expected(spec), []

    def rank_main(rank):
        try:
            worker = Worker(address, spec, rank)
            if spec.get("initial") == "broadcast":
                worker.broadcast([initial(k) for k in range(len(KEYS))])
            worker.wait(worker.first_round - 1)
            for round in range(1, ROUNDS + 1):
                for attempt in range(2 if round == reconnect_in and rank == 1 else 1):
                    if attempt > 0:  # what is sent again is the same bytes, and counts once
                        worker.reconnect()
                    for k in reversed(range(len(KEYS))):
                        worker.push(k, round, gradient(rank, round, k, worker.in_code))
                worker.wait(round)
                for k in range(len(KEYS)):
                    got, want = worker.parameters(k), wanted[round - 1][k]
                    bad = [i for i in range(len(got)) if struct.pack("<f", got[i]) !=
                           struct.pack("<f", want[i]) and not (got[i] == want[i] == 0)]
                    assert not bad, (f"{spec['name']} rank {rank} round {round} key {k}: element "
                                     f"{bad[0]} is {got[bad[0]]}, expected {want[bad[0]]}")
            worker.close()
        except BaseException as error:
            failures.append(f"{spec['name']} rank {rank}: {error!r}")

    threads = [threading.Thread(target=rank_main, args=[r], daemon=True) for r in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive() or failures, f"{spec['name']} hangs"
    assert not failures, failures
    print(f"{spec['name']}: {ROUNDS} rounds of {RANKS} ranks, every bit is right")


def wrong_frames(address):
    """A frame of another size or to another place is not summed, and the rank is told why."""
    # Of two chunks, the first in the box's memory is spoiled: behind it there is more. Which one that is
    # is the plan's to say: it spreads jobs over the cores, and the job before may not be gone.
    spoils = {
        "short": lambda at, p: (at, p[:-4]),
        "long": lambda at, p: (at, p + b"\0\0\0\0"),
        "elsewhere": lambda at, p: (at + 128, p),
    }
    says = {"short": "it sent 252 bytes", "long": "it sent 260 bytes",
            "elsewhere": "it sent a payload to offset"}
    for name, spoil in spoils.items():
        spec = {"name": "wrong-" + name, "keys": [{"name": "k", "elements": 128}],
                "chunk_elements": 64, "world_size": 2, "lease_ms": 300000}
        workers = []
        for rank in range(2):  # a rank is admitted at once
            workers.append(Worker(address, spec, rank))
            workers[-1].wait(0)
        bad, good = workers
        first = min(range(2), key=lambda c: bad.chunks[c]["box"])
        for c, chunk in enumerate(bad.chunks):
            frame = (chunk["box"] * 4, struct.pack("<64f", *[1.0] * 64))
            if c == first:
                frame = spoil(*frame)
            imm = chunk["index"] << 10 | 1 << 2 | DATA
            try:
                bad.queues[chunk["queue"]].send([(imm, *frame)])
            except OSError:
                pass  # closed already
        good.push(0, 1, [2.0] * 128)
        good.wait(1)  # it is not waited for any longer than it takes to find out
        landed = good.parameters(0)[64 * first:][:64]
        assert set(landed) == {2.0}, "a frame that cannot be was summed"
        for attempt in range(1000):
            try:
                bad.ask("heartbeat")
                time.sleep(0.01)
            except Refused as refused:
                assert refused.status == 410 and says[name] in refused.message, refused
                break
        else:
            raise AssertionError("nobody tells the rank why it was closed out")
        log = good.control.call("GET", f"/v1/jobs/{spec['name']}/log")["records"]
        assert any(r["kind"] == "lost" and says[name] in r["reason"] for r in log), log
        bad.close(leave=False)
        good.close()
        print(f"a frame that is {name}: {says[name]} …")


def control_port(address):
    control = Control(address)
    spec = {"name": "here", "keys": [{"name": "k", "elements": 7}]}
    worker = Worker(address, spec, 0)
    jobs = control.call("GET", "/v1/jobs")["jobs"]
    assert [job["name"] for job in jobs] == ["here"], jobs
    job = control.call("GET", "/v1/jobs/here")
    assert job["state"] == "running" and job["elements"] == 7, job
    assert control.call("GET", "/v1/jobs/here?pretty=1")["name"] == "here"
    for path in ["/v1/status", "/v1/jobs/here", "/healthz", "/metrics", "/", "/page.js?v=2"]:
        get, text = control.raw("GET", path)
        head, nothing = control.raw("HEAD", path)
        assert get.status == head.status == 200 and text and nothing == b"", path
        assert int(head.getheader("Content-Length")) > 0, path
        assert head.getheader("Content-Type") == get.getheader("Content-Type"), path
    answer, text = control.raw("GET", "/v1/jobs/nowhere")
    assert answer.status == 404 and json.loads(text)["code"] == "not_found"
    assert answer.getheader("Content-Type") == "application/problem+json"
    answer, _ = control.raw("PUT", "/v1/jobs/here")
    assert answer.status == 405 and answer.getheader("Allow") == "DELETE, GET, HEAD"
    worker.close()
    print("HEAD, queries, GET /v1/jobs and /v1/jobs/{job}: as the page says")


def main():
    server = subprocess.Popen([sys.argv[1], "serve", "--listen", "127.0.0.1:0", "--pin", "false",
                               "--topology", "pack:2 core:1 pu:1"], stdout=subprocess.PIPE, text=True)
    try:
        address = next(l.split()[-1] for l in server.stdout if l.startswith("listening on"))
        train(address, {"name": "sums", "keys": KEYS, "world_size": RANKS, "chunk_elements": 512,
                        "optimizer": "none"})
        train(address, {"name": "parameters", "keys": KEYS, "world_size": RANKS,
                        "chunk_elements": 512, "optimizer": "nesterov", "reduction": "mean",
                        "initial": "broadcast", "hyper": {"lr": 0.05, "weight_decay": 0.01},
                        "schedule": [{"round": 4, "values": {"lr": 0.005}}]})
        train(address, {"name": "half", "keys": KEYS, "world_size": RANKS, "chunk_elements": 512,
                        "optimizer": "nesterov", "initial": "broadcast", "gradient_dtype": "f16",
                        "parameter_dtype": "f16"})
        train(address, {"name": "reconnected", "keys": KEYS, "world_size": RANKS,
                        "chunk_elements": 512, "optimizer": "nesterov", "initial": "broadcast"},
              reconnect_in=3)
        wrong_frames(address)
        control_port(address)
    finally:
        server.kill()


if __name__ == "__main__":
    main()
