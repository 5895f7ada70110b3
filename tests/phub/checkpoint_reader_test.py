#!/usr/bin/env python3
"""Checkpoints as other tools read them: with numpy and the few lines that the format takes, and with the
package safetensors.

  checkpoint_reader_test.py CHECKPOINT_SAMPLE numpy|safetensors"""
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    if sys.argv[2] == "safetensors":
        import safetensors
except ImportError as missing:
    print(f"SKIPPED: {missing} (numpy: scripts/setup --test; safetensors: pip)")
    sys.exit(77)

ROUND, EPOCH = 123, 4
FILES = {"parameters.safetensors": 0, "state-momentum.safetensors": 1,
         "branch-2-parameters.safetensors": 3, "branch-2-state-momentum.safetensors": 4}
SHAPES = {"fc.weight": ("F32", (10, 7)), "empty": ("F32", (0, 3)), "größe": ("BF16", (5,)), "scalar": ("F32", ())}
CLOCKS = {"steps": ("I64", (4,)), "clocks": ("I64", (4, 2))}
TYPES = {"F32": numpy.dtype("<f4"), "BF16": numpy.dtype("<u2"), "I64": numpy.dtype("<i8")}


def read(path):
    """Tensors by name, as safetensors' documentation has it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = numpy.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def expected_bytes(seed, count):
    values = bytearray()
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append(seed >> 56)
    return bytes(values)


def crc32c(data):
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    state = 0xFFFFFFFF
    for byte in data:
        state = state >> 8 ^ table[(state ^ byte) & 255]
    return state ^ 0xFFFFFFFF


def check(tensors, slot, shapes=SHAPES):
    assert set(tensors) == set(shapes), tensors.keys()
    for index, (name, (word, shape)) in enumerate(shapes.items()):
        tensor = tensors[name]
        assert tensor.shape == shape and tensor.dtype == TYPES[word], name
        seed = ROUND * 1000 + EPOCH * 100 + index * 10 + slot
        assert tensor.tobytes() == expected_bytes(seed, tensor.nbytes), name


def check_with_numpy(folder):
    for name, slot in FILES.items():
        check(read(folder / name), slot)
    check(read(folder / "clocks.safetensors"), 2, CLOCKS)
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    envelope = json.loads(text)
    assert int(envelope["checksum"], 16) == crc32c(text.split(",", 1)[1].encode())
    assert envelope["version"] == 6
    manifest = envelope["manifest"]
    assert [(shelf["place"], shelf["branch"]) for shelf in manifest["branches"]["shelves"]] == [(2, 2)]
    assert (manifest["round"], manifest["epoch"], manifest["spec"]["name"]) == (ROUND, EPOCH, "digits.v2")
    assert [key.get("shape") for key in manifest["spec"]["keys"]] == [[10, 7], None]
    for entry in manifest["files"]:
        data = (folder / entry["name"]).read_bytes()
        assert len(data) == entry["bytes"] and [crc32c(data)] == entry["checksums"], entry["name"]
    assert {entry["name"] for entry in manifest["files"]} == {
        *FILES, "clocks.safetensors", "rank-1/%2E%2E%2F%2E%2E%2Fposition", "rank-12/random"}


def check_with_safetensors(folder):
    for name, slot in FILES.items():
        with safetensors.safe_open(folder / name, framework="numpy") as opened:
            assert set(opened.keys()) == set(SHAPES)
            tensors = {key: opened.get_tensor(key) for key in SHAPES if SHAPES[key][0] != "BF16"}
        tensors["größe"] = read(folder / name)["größe"]  # numpy has no such type
        check(tensors, slot)
    with safetensors.safe_open(folder / "clocks.safetensors", framework="numpy") as opened:
        check({key: opened.get_tensor(key) for key in opened.keys()}, 2, CLOCKS)


def main():
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.argv[1], directory], check=True)
        folder = pathlib.Path(directory) / "digits%2Ev2" / "round-000000000123.epoch-4"
        {"numpy": check_with_numpy, "safetensors": check_with_safetensors}[sys.argv[2]](folder)


main()
