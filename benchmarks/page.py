"""The lines of "Where it stands" (docs/speed.md), measured by one command on one H200.

    python benchmarks/page.py run --out out/page
    python benchmarks/page.py show out/page --out benchmarks/results/speed-h200.json

``run``: one part after the other, the most important first, each a command of its own with a limit of time. What is whole is
not run again; what was cut keeps its rows and is run again, decoding from where it was. ``show``: all rows as one file, and
the page's lines as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE = 5.0
"""Seconds between asking a part to end and killing it."""

DECODE = "kvpop bench decode --steps 20 --fit-static --budget 4096 --sinks 4 --window 256"
LONG, LARGEST = "--seen 16384 --seen 131072", "--largest-batch --policy kvpop-mlstm --policy dense"
STEP = "python benchmarks/step_cost.py --modes full --impl triton"
PARTS = {
    "decode-kvpop": (200, f"{DECODE} --policy kvpop-mlstm --policy kvpop-mlp --batch 1 --batch 32 --batch 8 {LONG}"),
    "step": (120, "python benchmarks/fused_step.py --policies mlstm mlp streaming --batch 1 32 8"),
    "sparse": (
        150,
        "python benchmarks/sparse_attention.py --lengths 16384 65536 --repeats 5 --impls triton flash flex",
    ),
    "parts": (180, "python benchmarks/parts.py --lengths 16384 --prefill 131072 --chunks 4096"),
    "train-16k": (120, f"{STEP} --layers 4 --length 16384 --scorers mlp mlstm --steps 3 --warm 6"),
    "train-65k": (120, f"{STEP} --layers 2 --length 65536 --scorers mlstm --steps 2 --warm 3"),
    "decode-dense": (120, f"{DECODE} --policy dense --batch 1 --batch 8 --batch 32 {LONG}"),
    "decode-others": (150, f"{DECODE} --policy streaming --policy dms --batch 1 --batch 32 --batch 8 {LONG}"),
    "largest-131k": (200, f"{DECODE} {LARGEST} --seen 131072"),
    "products": (60, "python benchmarks/few_rows.py --rows 1 8 32 --shapes whole"),
    "decode-compiled": (150, f"{DECODE} --policy dense-static --compile --batch 1 {LONG}"),
    "decode-transformers": (90, f"{DECODE} --policy dense-static --policy dense-eager --batch 1 {LONG}"),
    "transformers-rows": (
        120,
        f"{DECODE} --policy dense-static --policy dense-eager --batch 8 --batch 32 --seen 16384",
    ),
    "compiled-rows": (180, f"{DECODE} --policy dense-static --compile --batch 8 --batch 32 --seen 16384"),
    "largest": (300, f"{DECODE} {LARGEST} --seen 8192 --seen 32768"),
}
"""By name: at most so many seconds, and the command."""

Row = dict[str, Any]
Value = float | str | None
"""What a row says, why it does not, or that there is no such row."""


# Running.


def arguments(command: str, out: Path) -> list[str]:
    """A command with this Python, and where its result goes: ``kvpop bench`` takes a directory, a script a file."""
    program, *options = shlex.split(command)
    module = ["-m", "kvpop"] if program == "kvpop" else []
    return [sys.executable, *module, *options, "--out", str(out if module else out / "rows.json")]


def load(path: Path) -> dict[str, Any]:
    """A result, floats to five significant digits; nothing where there is none that can be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(), parse_float=lambda text: float(f"{float(text):.5g}")))
    return {}


def printed(log: Path) -> list[Row]:
    """The rows that a script printed before it was cut, one a line."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [row for row in found if isinstance(row, dict) and "rows" not in row]


def commit() -> str | None:
    git = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(git, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a part and what it began to end; kill what is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(name: str, out: Path, limit: float) -> bool:
    """Run a part for at most so many seconds and write what it found, also if interrupted; whether it is whole."""
    command, path, log, own = PARTS[name][1], out / f"{name}.json", out / f"{name}.log", out / name
    known = load(path)
    before = known if known.get("command") == command else {}
    if known != before or not command.startswith("kvpop"):  # decoding goes on from its own file
        shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    started, stopped = time.monotonic(), None
    with log.open("wb") as stream:
        process = subprocess.Popen(
            arguments(command, own), cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, process_group=0,
        )  # fmt: skip
        try:
            process.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            stopped = reason
            end(process)
    empty: dict[str, Any] = {"rows": printed(log)}
    found = next((x for x in map(load, own.glob("*.json")) if "rows" in x), empty)
    rows = [*found["rows"], *found.get("largest", [])]
    rc, seconds = process.returncode, round(time.monotonic() - started, 1)
    whole = rc == 0 and stopped is None and bool(rows)
    if whole or len(rows) >= len(before.get("rows", [])):
        part = {
            "command": command, "whole": whole, "rc": rc, "seconds": seconds, "commit": commit(),
            "machine": found.get("machine") or found.get("settings", {}).get("machine"), "versions": found.get("versions", {}),
            "bandwidth_gb_s": found.get("bandwidth_gb_s") or found.get("gb_per_s"), "rows": rows,
        }  # fmt: skip
        path.with_suffix(".tmp").write_text(json.dumps(part))
        os.replace(path.with_suffix(".tmp"), path)
    interrupted = isinstance(stopped, KeyboardInterrupt)
    state = "" if whole else ", interrupted" if interrupted else ", cut" if stopped else f", failed: see {log}"
    print(f"{name}: rc {rc}, {seconds} s, {len(rows)} rows{state}", flush=True)
    if interrupted:
        raise KeyboardInterrupt
    return whole


def run(out: Path, names: Sequence[str], seconds: float) -> bool:
    """Run the parts that are not whole, in the page's order, while there is time; whether all are whole now."""
    started, whole = time.monotonic(), True
    for name in (name for name in PARTS if name in names):
        limit, command = PARTS[name]
        known, left = load(out / f"{name}.json"), seconds - (time.monotonic() - started)
        if known.get("whole") and known["command"] == command:
            print(f"{name}: there already", flush=True)
        elif left > 0:
            whole &= run_part(name, out, min(limit, left))
        else:
            print(f"{name}: not begun, the {seconds:g} s are used up", flush=True)
            whole = False
    return whole


# Showing.


def shared(values: Iterable[Any]) -> Any:
    """What all have in common, or a list of what there is; those that say nothing do not count."""
    found = list(dict.fromkeys(x for x in values if x is not None))
    return found[0] if len(found) == 1 else found or None


def gathered(directory: Path) -> dict[str, Any]:
    """What all parts found. Raises ValueError where there is none."""
    found = {name: part for name in PARTS if (part := load(directory / f"{name}.json")).get("rows")}
    if not found:
        raise ValueError(f"{directory} holds none of the parts {', '.join(PARTS)}")
    parts, libraries = found.values(), ("kvpop", "torch", "transformers")
    about = ("command", "whole", "rc", "seconds", "bandwidth_gb_s")
    return {
        "what": "the lines of docs/speed.md: shapes of Qwen3-8B, 4,096 slots, window 256, bf16, random weights",
        "machine": shared(part["machine"] for part in parts),
        "versions": {name: shared(part["versions"].get(name) for part in parts) for name in libraries},
        "commit": shared(part["commit"] for part in parts) or commit(),
        "parts": {name: {key: part[key] for key in about} for name, part in found.items()},
        "rows": [{"from": name, **row} for name, part in found.items() for row in part["rows"]],
    }


def as_json(result: dict[str, Any]) -> str:
    """A part and a row a line."""
    parts = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in result["parts"].items())
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    head = json.dumps({name: x for name, x in result.items() if name not in ("parts", "rows")}, indent=1)
    return f'{head[:-2]},\n "parts": {{\n{parts}\n }},\n "rows": [\n{rows}\n ]\n}}\n'


def value(row: Row, name: str) -> Value:
    return "does not fit" if "skipped" in row else "failed" if "failed" in row else row.get(name)


def quotient(a: Value, b: Value) -> Value:
    return a / b if isinstance(a, int | float) and isinstance(b, int | float) else None


def cell(values: Sequence[Value], missing: str = "-") -> str:
    if all(x is None for x in values):
        return missing if values else "-"
    texts = (
        "-" if x is None else x if isinstance(x, str) else f"{x:,.0f}" if x >= 1000 else f"{x:.4g}" for x in values
    )
    return " / ".join(texts)


def verdict(target: str, ours: Sequence[Value], limit: Value) -> str:
    """The target, and of every value whether it was reached."""
    if not isinstance(limit, int | float):
        return target
    known = [x for x in ours if isinstance(x, int | float)]
    said = ["reached" if x <= limit else f"**missed by {100 * (x / limit - 1):.2g} %**" for x in known]
    return f"{target}: {' / '.join(said if len(set(said)) > 1 else said[:1])}" if said else target


def table(rows: list[Row]) -> list[str]:
    """The page's lines in Markdown; one whose rows are missing says so."""
    lines = ["| what | floor | simple | ours | ratio to floor | target |", "|---|---|---|---|---|---|"]

    def find(source: str, **want: Any) -> Row:
        alike = (x for x in rows if x["from"] == source and all(x.get(name) == y for name, y in want.items()))
        return next(alike, {})

    def line(
        what: str, ours: Sequence[Row], name: str, simple: Sequence[Value] = (), target: str = "", limit: Value = None,
        theirs: bool = False,
    ) -> None:  # fmt: skip
        """``name``: of the value in each row. ``theirs``: the rows are not ours but the simple way."""
        values = [value(x, name) for x in ours]
        floor, ratio = ([x.get(y) for x in ours] for y in ("floor_us" if name == "us" else "floor_ms", "ratio"))
        floor = floor[:1] if len(set(floor)) == 1 else floor
        mine, other = ((), values) if theirs else (values, simple)
        cells = (cell(floor), cell(other, "not measured"), cell(mine, "not measured"), cell(ratio))
        lines.append(f"| {what} | {' | '.join(cells)} | {verdict(target, mine, limit)} |")

    limit: Value
    more = {
        "decode-transformers": "transformers-rows",
        "decode-compiled": "compiled-rows",
    }  # of several rows, 16k alone

    for source, policy, name in (
        ("decode-kvpop", "kvpop-mlstm", "KVpop, mLSTM"), ("decode-kvpop", "kvpop-mlp", "KVpop, MLP"),
        ("decode-others", "streaming", "StreamingLLM"), ("decode-others", "dms", "DMS"),
        ("decode-dense", "dense", "dense, our own store"), ("decode-transformers", "dense-eager", "dense, eager cache"),
        ("decode-compiled", "dense-static", "dense, static cache, compiled"),
        ("decode-transformers", "dense-static", "dense, static cache, not compiled"),
    ):  # fmt: skip
        theirs = policy in ("dense-eager", "dense-static")
        pairs = []
        for batch in (1, 8, 32):
            rows_of = more.get(source, source) if batch > 1 else source
            pairs.append([find(rows_of, policy=policy, batch=batch, seen=seen) for seen in (16384, 131072)])
            limit = {1: 4.9, 32: 9.4}.get(batch) if policy.startswith("kvpop") else None
            what = f"decode, {name}, batch {batch}, 16k / 131k seen, ms a token"
            line(what, pairs[-1], "ms_per_token", target=f"{limit or ''}", limit=limit, theirs=theirs)
        if not policy.startswith("dense"):
            flat = [{"x": quotient(far.get("ms_per_token"), near.get("ms_per_token"))} for near, far in pairs]
            line(f"decode, {name}, batch 1 / 8 / 32, time at 131k to 16k", flat, "x", target="1.02", limit=1.02)
            above = [{"x": x["peak_gb"] - x["formula_gb"]} if x.get("peak_gb") else {} for _, x in pairs]
            what = f"decode, {name}, batch 1 / 8 / 32, peak at 131k above weights and formula, GB"
            line(what, above, "x", target=".3", limit=0.3)
    for source, seen in (("largest", 8192), ("largest", 32768), ("largest-131k", 131072)):
        ours, dense = (find(source, policy=policy, seen=seen) for policy in ("kvpop-mlstm", "dense"))
        counts = " / ".join(f"{x.get('batch', '-')}" for x in (dense, ours))
        what = (
            f"tokens/s of the largest batch, {seen:,} seen: KVpop, mLSTM; simple: dense, our own store; {counts} rows"
        )
        fastest = quotient(1e3 * ours.get("batch", 0), ours.get("floor_ms"))
        line(what, [ours | {"floor_ms": fastest}], "tokens_per_s", [value(dense, "tokens_per_s")])
    for batch in (1, 8, 32):
        steps = [find("step", policy=policy, batch=batch) for policy in ("mlstm", "mlp", "streaming")]
        plain = next((x["plain_attention_us"] for x in steps if x), None)
        limit = None if plain is None or batch == 8 else plain + 3 if batch == 1 else 1.05 * plain
        target = {1: "3 above plain", 8: "", 32: "5 % above plain"}[batch] + (f", {limit:.1f}" if limit else "")
        what = f"the step of a store, batch {batch}, us: mLSTM / MLP / StreamingLLM; simple: attention over full slots"
        line(what, steps, "us", [plain], target, limit)
    for batch in (1, 8, 32):
        ours = find("products", rows=batch, what="whole", impl="triton", changed={"OVERLAP": True})
        library = find("products", rows=batch, what="whole", impl="library")
        what = f"products of a layer with all around them, batch {batch}, us; simple: the library"
        line(what, [ours], "us", [value(library, "us")])
    for S, name, target in ((16384, "forward_backward", "10"), (16384, "forward", ""), (65536, "forward_backward", "")):
        ours, *simple = (find("sparse", impl=impl, S=S).get(name, {}) for impl in ("triton", "flash", "flex"))
        limit = 10.0 if target else None
        if S == 65536:
            target, limit = "4 times faster than flash", quotient(simple[0].get("ms"), 4)
        what = f"sparse attention, S = {S // 1000}k, {name.replace('_', ' + ')}, ms; simple: flash / flex"
        line(what, [ours], "ms", [x.get("ms") for x in simple], target, limit)
    for part, plain, limit in (
        ("cutoff and expiry, the heads of one layer", None, 1), ("cutoff and expiry, those of 36 layers", None, 1),
        ("key lists and schedule of the Triton kernels", "block mask for flex, forward and backward", 0.5),
        ("future mass, Triton", "future mass, flex", 3), ("scores of 8 heads, mLSTM", "scores of 8 heads, mLSTM, torch", 2),
    ):  # fmt: skip
        other = [value(find("parts", part=plain, S=16384), "ms")] if plain else []
        what = f"{part}, S = 16k, ms" + (f"; simple: {plain}" if plain else "")
        line(what, [find("parts", part=part, S=16384)], "ms", other, f"{limit}", limit)
    for source, what, scorers, target, limit in (
        ("train-16k", "S = 16k, 4 layers: MLP / mLSTM", ("mlp", "mlstm"), "1.15", 1.15),
        ("train-65k", "S = 65k, 2 layers: mLSTM", ("mlstm",), "below 1", 1.0),
    ):
        plain, *times = (find(source, policy=x).get("seconds") for x in ("dense", *(f"kvpop-{y}" for y in scorers)))
        over = [{"x": quotient(x, plain)} for x in times]
        line(f"training step to plain KL fine-tuning, {what}", over, "x", target=target, limit=limit)
    dense, *bounded = (
        find("parts", prefill=x, tokens=131072) for x in ("dense", "streaming", "kvpop-mlp", "kvpop-mlstm")
    )
    for name, unit in (("seconds", "s"), ("peak_gb", "peak GB")):
        what = f"prefill of 131k tokens in chunks of 4,096, 4 layers, {unit}: StreamingLLM / MLP / mLSTM; simple: dense"
        line(what, bounded, name, [value(dense, name)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure what is not measured yet")
    running.add_argument("--out", type=Path, required=True, help="directory of results and logs")
    running.add_argument("--seconds", type=float, default=2400, help="for all parts together")
    running.add_argument("--only", nargs="+", choices=list(PARTS), metavar="NAME", help=f"some of {', '.join(PARTS)}")
    showing = commands.add_parser("show", help="gather what was measured")
    showing.add_argument("directory", type=Path, help="--out of run")
    showing.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "speed-h200.json")
    options = parser.parse_args()
    if options.command == "show":
        try:
            result = gathered(options.directory)
        except ValueError as error:
            showing.error(str(error))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(as_json(result))
        print("\n".join(table(result["rows"])))
        return
    if not options.seconds > 0:
        running.error(f"--seconds must be above 0, got {options.seconds:g}")
    if options.out.exists() and not options.out.is_dir():
        running.error(f"--out {options.out} is a file: results need a directory")
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background jobs begin with it ignored
        signal.signal(number, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        sys.exit(0 if run(options.out.resolve(), options.only or list(PARTS), options.seconds) else 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
