#!/usr/bin/env python3
"""The control port's own description of itself, held against what it does: every answer fits its schema, and
what a schema refuses the server refuses, too.

  openapi_test.py PHUB CONTROL_README [SEED]"""
import copy
import http.client
import json
import random
import re
import subprocess
import sys

try:
    import jsonschema
except ImportError as missing:
    print(f"SKIPPED: {missing} (scripts/setup --test)")
    sys.exit(77)

phub, readme = sys.argv[1:3]
seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().getrandbits(32)
print(f"seed {seed}")
rng = random.Random(seed)

JOB = {"name": "digits", "keys": [{"name": "w", "elements": 40000}, {"name": "b", "elements": 8, "priority": 1}],
       "world_size": 1, "max_ranks": 4, "optimizer": "nesterov", "hyper": {"lr": 0.5, "momentum": 0.9},
       "schedule": [{"round": 7, "values": {"lr": 0.25}}], "lease_ms": 600000, "progress_limit_ms": 600000}


class Port:
    def __init__(self, address):
        self.address = address
        self.document = json.loads(self.send("GET", "/v1/openapi.json")[2])
        self.validators = {}

    def send(self, method, path, body=None, ticket=None):
        """Status, content type, text."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if ticket:
            headers["Authorization"] = f"Bearer {ticket}"
        connection = http.client.HTTPConnection(self.address, timeout=120)
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, answer.headers["Content-Type"], text

    def validator(self, schema):
        """Of '#/components/schemas/NAME'."""
        if schema not in self.validators:
            self.validators[schema] = jsonschema.Draft202012Validator({"$ref": schema, **self.document})
        return self.validators[schema]

    def operation(self, method, pattern):
        return self.document["paths"][pattern][method.lower()]

    def call(self, method, pattern, body=None, ticket=None, status=200, **values):
        """The decoded answer, which has the type and the shape that the document says."""
        got, content_type, text = self.send(method, pattern.format(**values), body, ticket)
        assert got == status, (method, pattern, got, text)
        operation = self.operation(method, pattern)
        responses = operation["responses"]
        content = responses["200" if got == 200 else "default"]["content"]
        assert content_type.split(";")[0] in content, (content_type, content)
        media = content[content_type.split(";")[0]]
        if "schema" not in media:
            return text
        if body is not None and got == 200:
            self.validator(operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]).validate(body)
        decoded = json.loads(text)
        self.validator(media["schema"]["$ref"]).validate(decoded)
        return decoded


def check_document(document):
    assert document["openapi"].startswith("3.1.")
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        for field, of in schema["properties"].items() if "properties" in schema else ():
            if "default" in of:  # what is left out means something that may be given
                jsonschema.Draft202012Validator({**of, **{k: document[k] for k in ("components",)}}).validate(of["default"])
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used == set(schemas), used ^ set(schemas)
    for pattern, operations in document["paths"].items():
        for method, operation in operations.items():
            named = {parameter["name"] for parameter in operation["parameters"]}
            assert named == set(re.findall(r"{(\w+)}", pattern)), (pattern, named)
            for way in operation["security"]:
                assert set(way) <= set(document["components"]["securitySchemes"])
            assert ("requestBody" in operation) == (method == "post")
    rows = re.findall(r"^\| `([A-Z]+)` \| `([^`]+)` \| ([^|]*) \| ([^|]*) \|", open(readme).read(), re.M)
    assert {(m.lower(), p) for m, p, _, _ in rows} == {(m, p) for p, all in document["paths"].items() for m in all}
    for method, pattern, body, answer in rows:
        operation = document["paths"][pattern][method.lower()]
        for words, place in ((body, operation.get("requestBody", {})), (answer, operation["responses"]["200"])):
            for message in re.findall(r"`([A-Z]\w+)`", words):
                names = set(re.findall(r'/schemas/(\w+)"', json.dumps(place)))
                assert message in names | ({"JobStatus"} if "JobList" in names else set()), (method, pattern, message)


def check_branches(port):
    """Of a job that has some."""
    spec = {**{key: JOB[key] for key in ("keys", "optimizer", "hyper")}, "name": "tree", "branches": 2}
    joined = port.call("POST", "/v1/jobs/{job}/join", {"version": 1, "spec": spec, "transport": "tcp"}, job="tree")
    asked = {"rank": 0, "incarnation": joined["incarnation"], "action": "fork", "values": {"lr": 0.25}, "round": 5}

    def ask(**fields):
        return port.call("POST", "/v1/jobs/{job}/branches", {**asked, **fields}, joined["offer"]["ticket"], job="tree")

    assert ask()["branch"] == 1
    turns = [{"branch": 1, "rounds": 3}, {"branch": 0}]
    assert ask(action="schedule", turns=turns)["runs"] == [
        {"round": 1, "branch": 0}, {"round": 5, "branch": 1}, {"round": 8, "branch": 0}]
    for action, why in (("kill", "keeps no checkpoints"), ("revive", "is not killed")):
        answer = port.call("POST", "/v1/jobs/{job}/branches", {**asked, "action": action, "branch": 1},
                           joined["offer"]["ticket"], status=400, job="tree")
        assert why in answer["detail"], answer
    assert ask(action="discard", branch=1)["round"] == 8
    assert [branch["branch"] for branch in ask(action="list")["branches"]] == [0]
    assert len(port.call("GET", "/v1/jobs/{job}", job="tree")["branches"]) == 1
    assert port.call("DELETE", "/v1/jobs/{job}", job="tree") == {}


def check_answers(port):
    """One of every route; returns the ticket of rank 0."""
    job = {"job": JOB["name"]}
    joined = port.call("POST", "/v1/jobs/{job}/join", {"version": 1, "spec": JOB, "transport": "tcp"}, **job)
    ticket = joined["offer"]["ticket"]
    who = {"rank": 0, "incarnation": joined["incarnation"]}
    assert joined["spec"]["keys"][1]["name"] == "b"
    assert "completed_round" in port.call("POST", "/v1/jobs/{job}/heartbeat", who, ticket, **job)
    assert port.call("POST", "/v1/jobs/{job}/barrier", who, ticket, **job) == {}
    assert port.call("POST", "/v1/jobs/{job}/hyper", {**who, "values": {"lr": 0.125}}, ticket, **job)["round"] >= 1
    answer = port.call("POST", "/v1/jobs/{job}/branches", {**who, "action": "list"}, ticket, status=400, **job)
    assert "has no branches" in answer["detail"], answer
    check_branches(port)
    state = port.call("POST", "/v1/jobs/{job}/state", {**who, "keys": [1]}, ticket, **job)
    piece = "/v1/jobs/{job}/state/{rank}/{incarnation}/{epoch}/{offset}"
    place = {**job, "rank": 0, "incarnation": who["incarnation"], "epoch": 0}
    assert len(port.call("GET", piece, None, ticket, **place, offset=8)) == state["bytes"] - 8
    assert port.call("GET", piece, None, ticket, status=400, **place, offset=state["bytes"])["code"] == "invalid"
    assert port.call("POST", "/v1/jobs/{job}/state/apply", who, ticket, status=404, **job)["code"] == "not_found"
    answer = port.call("POST", "/v1/jobs/{job}/checkpoint", who, ticket, status=400, **job)
    assert "--checkpoints" in answer["detail"], answer
    assert port.call("POST", "/v1/jobs/{job}/state/end", who, ticket, **job) == {}
    assert port.call("POST", "/v1/jobs/{job}/reconnect", who, ticket, **job)["transport"] == "tcp"
    assert port.call("GET", "/v1/jobs/{job}/log", **job)["records"]
    assert port.call("GET", "/v1/jobs/{job}/log/{from}", **{**job, "from": 1})["first"] == 1
    assert port.call("GET", "/v1/jobs/{job}", **job)["ranks"]
    assert len(port.call("GET", "/v1/jobs")["jobs"]) == 1
    assert port.call("GET", "/v1/status")["jobs"][0]["name"] == JOB["name"]
    for pattern in ("/healthz", "/readyz", "/metrics", "/", "/page.css", "/page.js", "/v1/openapi.json"):
        assert port.call("GET", pattern)
    assert port.call("POST", "/v1/jobs/{job}/heartbeat", who, "0" * 32, status=401, **job)["code"] == "unauthorized"
    assert port.call("GET", "/v1/jobs/{job}", job="nobody", status=404)["code"] == "not_found"
    assert port.call("DELETE", "/v1/jobs/{job}", job="nobody", status=404)["code"] == "not_found"
    return ticket, who


def places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, path + (key,))


SOME = (None, True, False, 0, 1, -1, -2, 1.5, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 1e300, "", "sum", "x" * 300, [], [0], {},
        {"a": 1})


def mutated(body):
    body = copy.deepcopy(body)
    path = rng.choice([p for p in places(body) if p])
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    change = rng.randrange(3)
    if change == 0:
        parent[path[-1]] = rng.choice(SOME)
    elif change == 1:
        del parent[path[-1]]
    elif isinstance(parent, dict):
        parent[rng.choice(("extra", "rank", "name", "priority"))] = rng.choice(SOME)
    else:
        parent.append(rng.choice(SOME))
    return body


def check_refusals(port, ticket, who):
    """What a schema refuses, the server refuses."""
    bodies = {"/v1/jobs/{job}/join": {"version": 1, "spec": JOB, "transport": "tcp", "rank": 0, "id": "f" * 32},
              "/v1/jobs/{job}/heartbeat": who,
              "/v1/jobs/{job}/hyper": {**who, "round": 9, "values": {"lr": 0.125}},
              "/v1/jobs/{job}/state": {**who, "set": True, "keys": [0, 1], "steps": [3, 4]},
              "/v1/jobs/{job}/branches": {**who, "action": "schedule", "round": 9, "turns": [{"branch": 0, "rounds": 1}]},
              "/v1/jobs/{job}/checkpoint": {**who, "round": 9}}
    both = accepted = 0
    for _ in range(1800):
        pattern, body = rng.choice(list(bodies.items()))
        body = mutated(body)
        schema = port.operation("POST", pattern)["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fits = port.validator(schema).is_valid(body)
        status, _, text = port.send("POST", pattern.format(job=JOB["name"]), body, ticket)
        if not fits:
            both += 1
            assert status == 400 and json.loads(text)["code"] == "invalid", (pattern, body, status, text)
        elif status == 400:
            detail = json.loads(text)["detail"]
            assert not re.search(r"unknown field|field .* is missing|must be (true or|an? (integer|positive|number|string|list|obj))", detail), detail
        # The message is right in itself: what is wrong is not of its shape (or it joined a rank that is there).
        accepted += fits and status != 400
    assert both > 300 and accepted > 100, (both, accepted)
    print(f"{both} refused by schema and server, {accepted} taken by both")


server = subprocess.Popen([phub, "serve", "--listen", "127.0.0.1:0", "--pin", "false", "--topology", "pack:1 core:1 pu:1"],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
try:
    address = next(line.split()[-1] for line in server.stdout if line.startswith("listening on"))
    port = Port(address)
    check_document(port.document)
    check_refusals(port, *check_answers(port))
    assert port.call("DELETE", "/v1/jobs/{job}", job=JOB["name"]) == {}
finally:
    server.kill()
    server.wait()
