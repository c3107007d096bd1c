"""Plain data as lines of JSON that keep tuples, sets and the keys of dictionaries. What arrives is data, never an object that
could say it is equal to everything: a subclass travels as what it is derived from, anything else not at all."""

import json

SEVERAL = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def pack(value, depth=0):
    if depth > 50:
        raise ValueError("nested deeper than 50")
    if value is None or value is True or value is False:
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for name, several in SEVERAL.items():
        if isinstance(value, several):
            return {name: [pack(one, depth + 1) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, depth + 1), pack(one, depth + 1)] for key, one in dict.items(value)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "item") and hasattr(value, "dtype"):  # a number of numpy
        return pack(value.item(), depth + 1)
    raise TypeError(f"{type(value).__name__} is no plain data")


def unpack(value):
    if not isinstance(value, dict):
        return value
    ((name, held),) = value.items()
    if name == "dict":
        return {unpack(key): unpack(one) for key, one in held}
    if name == "bytes":
        return bytes.fromhex(held)
    if name == "complex":
        return complex(*held)
    return SEVERAL[name](unpack(one) for one in held)


def send(file, what):
    file.write(json.dumps(what) + "\n")
    file.flush()


def receive(file):
    line = file.readline(1 << 24)
    return json.loads(line) if line.endswith("\n") else None
