"""Graded rollouts as the tables of the paper: methods by compression ratio, tasks as columns, average and relative retention.

``build`` makes one JSON value of everything that is said, numbers unrounded; ``markdown`` and ``latex`` write it down.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpop.evals import paper
from kvpop.evals.grades import GRADES, SCORE, read_grader, tally
from kvpop.evals.rollouts import STEM, place_of, read_rows, read_settings
from kvpop.evals.statistics import Comparison, Interval, Scores, compare, estimate, pass_at_k, sentence
from kvpop.jsonl import differences, flat

FORMATS = ("md", "latex", "json")
TEACHER = "Teacher"
UNGRADED = {"timeout": "took their grader too long", "refused": "hold code that was not run"}
NEAR = 0.015
"""Compression ratios that differ by no more than this stand together: budgets matched in memory differ a little in slots."""
MISSING = "-"


@dataclass(frozen=True)
class Result:
    """The graded rollouts of one policy on one task. ``ratio``: compression, 0 of the dense model, None if not known."""

    directory: str
    settings: Mapping[str, Any]
    grader: Mapping[str, Any]
    grades: Sequence[Mapping[str, Any]] = field(repr=False)
    context: int

    @property
    def task(self) -> str:
        return self.settings["task"]["name"]

    @property
    def model(self) -> str:
        return self.settings["model"]["id"]

    @property
    def variant(self) -> str:
        """The policy as the paper calls it, if it does."""
        policy = self.settings["policy"]
        kind, settings, trained = policy["kind"], policy["settings"], policy["adapter"] is not None
        if kind == "Dense":
            return TEACHER
        if kind == "Streaming":
            places = " (cache positions)" if settings.get("positions") == "cache" else ""
            return f"StreamLLM{'+' if trained else ''}{places}"
        if kind == "KVpop":
            scorer = {"mlp": " mlp", "mlstm-immediate": " immediate"}.get(settings.get("scorer", ""), "")
            return f"KVpop{scorer}{' by head' if settings.get('heads') else ''}"
        return {"Tova": "TOVA"}.get(kind, kind)

    @property
    def ratio(self) -> float | None:
        policy, slots = self.settings["policy"], self.settings["budget"]["slots"]
        if policy["kind"] == "Dense":
            return 0.0
        if slots is not None:
            return max(0.0, 1.0 - slots / self.context)
        aimed = policy["settings"].get("ratio")
        return None if aimed is None else 1.0 - 1.0 / aimed

    @property
    def method(self) -> tuple[Any, ...]:
        """What makes a row of the table, with ``decoding`` where that differs."""
        policy = self.settings["policy"]
        return self.variant, json.dumps(policy, sort_keys=True), self.settings["budget"]["slots"]

    @property
    def scores(self) -> Scores:
        found: dict[str, list[float]] = {}
        for row in self.grades:
            found.setdefault(row["item"], []).append(row["score"])
        return found

    @property
    def held(self) -> float | None:
        """How many tokens a KV head held at the end of a rollout, on average, if the cache grows; None if not known of all."""
        counts = [row["held"] for row in self.grades if "held" in row]
        return sum(counts) / len(counts) if len(counts) == len(self.grades) else None

    @property
    def taken_in(self) -> float:
        """How many tokens a rollout had taken in at its end, on average: all but the last that was generated."""
        return sum(row["prompt_tokens"] + row["tokens"] - 1 for row in self.grades) / len(self.grades)

    @property
    def grows(self) -> bool:
        return self.settings["budget"]["slots"] is None and self.settings["policy"]["kind"] != "Dense"

    @property
    def expected(self) -> int:
        return self.settings["extent"]["items"] * self.settings["extent"]["rollouts"]

    @property
    def shortfalls(self) -> list[str]:
        """In what it is not the whole task."""
        extent, size = self.settings["extent"], self.settings["task"]["size"]
        said = [] if extent["items"] == size else [f"the first {extent['items']} of {size} problems"]
        if len(self.grades) != self.expected:
            said.append(f"{len(self.grades)} of {self.expected} rollouts graded")
        return said


def read_result(directory: Path, context: int) -> Result:
    """The result in a directory. Raises FileNotFoundError or ValueError for what is missing or no result."""
    for name in (f"{GRADES}.jsonl", f"{GRADES}.json", f"{STEM}.json"):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} has no {name}: grade it with kvpop tasks grade")
    settings = read_settings(directory / f"{STEM}.json")
    grades = sorted(read_rows(directory / f"{GRADES}.jsonl", SCORE), key=place_of)
    if not grades:
        raise ValueError(f"{directory / GRADES}.jsonl has no grades")
    for row in grades:
        if not 0 <= row["score"] <= 1:
            raise ValueError(
                f"{directory / GRADES}.jsonl: item {row.get('item')} has score {row['score']}, not in [0, 1]"
            )
    return Result(str(directory), settings, read_grader(directory / f"{GRADES}.json"), grades, context)


def read_results(paths: Sequence[str | Path], context: int = paper.CONTEXT) -> list[Result]:
    """The results in directories, or below them.

    Raises FileNotFoundError for one without any; ValueError for two of the same model, method and task that were sampled alike,
    and for ``context`` (tokens that compression ratios refer to) below 1.
    """
    if context < 1:
        raise ValueError(f"--context must be at least 1 token, got {context}")
    found: dict[Path, Result] = {}
    for path in map(Path, paths):
        own = (
            [path] if (path / f"{GRADES}.jsonl").is_file() else sorted(p.parent for p in path.rglob(f"{GRADES}.jsonl"))
        )
        if not own:
            raise FileNotFoundError(f"no graded rollouts in or below {path}: there is no {GRADES}.jsonl")
        found |= {p.resolve(): read_result(p, context) for p in own}
    known: dict[Any, Result] = {}
    for result in found.values():
        decoding = json.dumps(result.settings["decoding"], sort_keys=True)
        other = known.setdefault((result.model, result.task, result.method, decoding), result)
        if other is not result:
            apart = [one for part in ("extent", "task", "model", "budget") for one in _differences(part, other, result)]
            raise ValueError(
                f"{other.directory} and {result.directory} are both {result.variant} on {result.task}, sampled alike; "
                f"what differs makes no row of its own ({'; '.join(apart) or 'nothing'}): give one of them"
            )
    return list(found.values())


def _differences(part: str, one: Result, other: Result) -> list[str]:
    return [f"{part}.{said}" for said in differences(one.settings[part], other.settings[part])]


# What is said


def build(results: Sequence[Result], command: Sequence[str] = (), draws: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Everything a report says, as JSON values.

    "tables": a table a model and set of tasks (those of the paper's tables first), with "rows" of "cells" (a column each: score
    with its interval, tally, comparison with the teacher; None where there is none), "average" and "relative" (None unless
    every cell is there), "paper" (the paper's figures for this row or None), "sentences" and "notes". "results": where each
    came from. Labels say how a row was sampled where that is not what most methods of a task have in common.
    """
    tables = []
    for model in dict.fromkeys(result.model for result in results):
        own = [result for result in results if result.model == model]
        seen: set[str] = set()
        for source in paper.TABLES:
            tasks = [result.task for result in own if result.task in source.columns]
            if tasks:
                tables.append(_table(own, dict(source.columns), source, draws, seed))
                seen |= source.columns.keys()
        others = {r.task: r.settings["task"]["title"] for r in own if r.task not in seen}
        if others:
            tables.append(_table(own, others, None, draws, seed))
    return {
        "tables": tables,
        "results": [_provenance(result) for result in results],
        "paper": paper.CITATION,
        "bootstrap": {"draws": draws, "seed": seed, "level": 0.95, "over": "problems"},
        "context": results[0].context if results else None,
        "command": list(command),
    }


def _table(
    results: Sequence[Result], columns: Mapping[str, str], source: paper.PaperTable | None, draws: int, seed: int
) -> dict[str, Any]:
    model = results[0].model
    title = model
    printed: tuple[paper.Row, ...] = ()
    if source is not None and Path(model).name in source.models:
        title, printed = source.models[Path(model).name]
    results = [result for result in results if result.task in columns]
    usual = _usual(results)
    by_method: dict[Any, dict[str, Result]] = {}
    for result in results:
        way = _otherwise(result.settings["decoding"], usual[result.task])
        by_method.setdefault((*result.method, way), {})[result.task] = result
    groups = _groups({key: next(iter(cells.values())).ratio for key, cells in by_method.items()})
    rows: list[dict[str, Any]] = [
        {"key": key, "group": groups[key], "label": key[0], "results": cells, "paper": None}
        for key, cells in by_method.items()
    ]
    for variant, ratio, figures in printed:
        same = [row for row in rows if row["label"] == variant and row["group"] == ratio]
        if not same:
            same = [{"key": None, "group": ratio, "label": variant, "results": {}, "paper": None}]
            rows += same
        for row in same:
            row["paper"] = list(figures)
    order = {name: i for i, name in enumerate(paper.VARIANTS)}
    rows.sort(
        key=lambda row: (
            row["group"] is None, row["group"] or 0.0, order.get(row["label"], len(order)), row["label"],
            row["key"] and (row["key"][2] or 0, row["key"][1], row["key"][3]),
        )
    )  # fmt: skip
    _tell_apart(rows)
    _say_what_grew(rows)
    teachers = [result for result in results if result.variant == TEACHER]
    sentences: list[str] = []
    notes: list[str] = []
    made = [_row(row, columns, teachers, draws, seed, sentences, notes) for row in rows]
    return {
        "number": source.number if source else None,
        "title": f"{source.title if source else 'Accuracy'}, {title}",
        "model": model,
        "columns": [{"task": task, "title": name} for task, name in columns.items()],
        "paper_average": bool(source and source.average and printed),
        "rows": made,
        "sentences": sentences,
        "notes": notes,
    }


def _groups(ratios: Mapping[Any, float | None]) -> dict[Any, float | None]:
    """For every method the compression ratio it stands under: the paper's if it is near, else the lowest of those near it."""
    found: dict[Any, float | None] = {}
    first = None
    for key, ratio in sorted(ratios.items(), key=lambda pair: -1.0 if pair[1] is None else pair[1]):
        if ratio is None or ratio == 0:
            found[key] = ratio
            continue
        near = [known for known in paper.RATIOS if abs(known - ratio) <= NEAR]
        if near:
            found[key] = near[0]
            continue
        first = ratio if first is None or ratio - first > NEAR else first
        found[key] = first
    return found


def _usual(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """For every task the settings of decoding that most methods have in common; of equals the teacher's."""
    users: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for result in results:
        users[result.task][json.dumps(result.settings["decoding"], sort_keys=True)].add(result.method)

    def rank(way: tuple[str, set[Any]]) -> tuple[int, bool, str]:
        return -len(way[1]), all(method[0] != TEACHER for method in way[1]), way[0]

    return {task: json.loads(min(ways.items(), key=rank)[0]) for task, ways in users.items()}


def _otherwise(decoding: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[str, ...]:
    """In what settings of decoding differ from the usual ones, in the words of a label."""
    names = sorted(name for name in {*decoding, *usual} if decoding.get(name) != usual.get(name))
    return tuple(_worded(name, decoding.get(name)) for name in names)


def _worded(name: str, value: Any) -> str:
    words = {None: "not set", True: "on", False: "off"}
    said = (
        words[value]
        if value is None or isinstance(value, bool)
        else f"{value:,g}"
        if isinstance(value, float)
        else value
    )
    return f"{name.replace('_', ' ')} {said}"


def _tell_apart(rows: Sequence[dict[str, Any]]) -> None:
    """Add to labels that stand twice under one ratio in what their policies differ (slots, else the adapter, else settings),
    and in what their sampling is not the usual."""
    alike: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["key"] is not None:
            alike[row["group"], row["label"]].append(row)
    for same in alike.values():
        facts = [_facts(row["key"]) for row in same]
        methods = {row["key"][:3] for row in same}
        for name in dict.fromkeys(name for own in facts for name in own):
            labels = [f"{row['label']}, {own.get(name, f'no {name}')}" for row, own in zip(same, facts)]
            if len({row["label"] for row in same}) == len(methods):
                break
            if len(set(labels)) > len({row["label"] for row in same}):
                for row, label in zip(same, labels):
                    row["label"] = label
        for row in same:
            row["label"] = ", ".join([row["label"], *row["key"][3]])


def _say_what_grew(rows: Sequence[dict[str, Any]]) -> None:
    """Add to the labels of caches without a bound how many tokens they held: they stand under the ratio that was aimed at."""
    for row in rows:
        growing = [result for result in row["results"].values() if result.grows]
        if growing:
            known = [result.held for result in growing if result.held is not None]
            least, most = (f"{pick(known):,.0f}" if known else "" for pick in (min, max))
            said = least if least == most else f"{least} to {most}"
            row["label"] += f" [{said if len(known) == len(growing) else 'unknown number of'} tokens held]"


def _facts(key: tuple[Any, ...]) -> dict[str, str]:
    """What tells a method from another of its name, in the words of a label, the plainest first."""
    policy, slots = json.loads(key[1]), key[2]
    return {
        "slots": f"{slots} slots",
        "adapter": f"adapter {policy['adapter'][:8]}" if policy["adapter"] else "no adapter",
        **{
            name: f"{name.removeprefix('budget.')} {value}"
            for name, value in flat(policy["settings"]).items()
            if not isinstance(value, list)
        },
        "policy": f"policy {hashlib.sha256(key[1].encode()).hexdigest()[:8]}",
    }


def _row(
    row: Mapping[str, Any], columns: Mapping[str, str], teachers: Sequence[Result], draws: int, seed: int,
    sentences: list[str], notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    results, label = row["results"], f"{row['label']}{_under(row['group'])}"
    is_teacher = any(result.variant == TEACHER for result in results.values())
    cells: list[dict[str, Any] | None] = []
    paired: list[tuple[Scores, Scores]] = []
    for task, title in columns.items():
        result = results.get(task)
        if result is None:
            cells.append(None)
            continue
        counts = tally(result.grades)
        if result.grows:
            notes.append(f"{label} on {title}: {_growth(result)}.")
        notes += [f"{label} on {title}: {said}." for said in result.shortfalls]
        notes += [
            f"{label} on {title}: {counts[outcome]} of {counts['rollouts']} rollouts {said} and count as wrong."
            for outcome, said in UNGRADED.items()
            if counts[outcome]
        ]
        cell: dict[str, Any] = {
            "directory": result.directory,
            "score": asdict(estimate([result.scores], draws, seed)),
            "tally": counts,
            "expected": result.expected,
            "shortfalls": result.shortfalls,
            "held": result.held,
            "comparison": None,
        }
        if not is_teacher:
            teacher = _teacher_of(result, teachers)
            outcome = _against(result, teacher, draws, seed)
            if teacher is not None and isinstance(outcome, Comparison):
                cell["comparison"] = asdict(outcome)
                paired.append((result.scores, teacher.scores))
                sentences.append(sentence(label, title, outcome))
            else:
                notes.append(f"{label} on {title} is not compared with the teacher: {outcome}.")
        cells.append(cell)
    average = relative = None
    if cells and all(cell is not None for cell in cells):
        average = asdict(estimate([results[task].scores for task in columns], draws, seed))
        if is_teacher:
            relative = asdict(Interval(1.0 if average["value"] else None))
        elif len(paired) == len(columns):
            both = compare([own for own, _ in paired], [theirs for _, theirs in paired], draws, seed)
            relative = asdict(both.retention)
            if len(columns) > 1:
                sentences.append(sentence(label, f"the average of the {len(columns)} tasks", both))
    return {
        "label": row["label"],
        "group": row["group"],
        "cells": cells,
        "average": average,
        "relative": relative,
        "paper": row["paper"],
    }


def _growth(result: Result) -> str:
    if result.held is None:
        return "its cache grows, and how much of it was held is not in (all of) the grades"
    share = result.held / result.taken_in
    aim = "" if result.ratio is None else f", {_percent(1 - result.ratio)} was the aim"
    return (
        f"its cache grows, and a KV head held {result.held:,.0f} tokens at the end of a rollout, on average, of the "
        f"{result.taken_in:,.0f} it had taken in ({_percent(share)}{aim})"
    )


def _teacher_of(result: Result, teachers: Sequence[Result]) -> Result | None:
    """The teacher's result on the same task that was sampled the same way, else the nearest one, which cannot be compared."""
    there = [teacher for teacher in teachers if teacher.task == result.task]
    return min(there, key=lambda teacher: len(_differences("decoding", teacher, result)), default=None)


def _against(result: Result, teacher: Result | None, draws: int, seed: int) -> Comparison | str:
    """The comparison with the teacher, or why there is none."""
    if teacher is None:
        return "the teacher has no result there"
    where = f"{teacher.directory} and {result.directory}"
    for part in ("task", "decoding", "model"):
        if other := _differences(part, teacher, result):
            return f"the {part} of {where} differs ({'; '.join(other)})"
    if result.grader.get("grader") != teacher.grader.get("grader"):
        return f"{where} were graded by different graders"
    try:
        return compare([result.scores], [teacher.scores], draws, seed)
    except ValueError as error:
        return str(error)


def _under(group: float | None) -> str:
    return "" if not group else f" at {_percent(group)}"


def _percent(ratio: float) -> str:
    """88 % is 87.5 %, rounded up as the paper does."""
    return f"{int(100 * ratio + 0.5 + 1e-9)}%"


def _provenance(result: Result) -> dict[str, Any]:
    settings, most = result.settings, min(map(len, result.scores.values()))
    ks = [1 << i for i in range(1, most.bit_length()) if 1 << i <= most]
    return {
        "directory": result.directory,
        "method": result.variant,
        "compression": result.ratio,
        **{name: settings[name] for name in ("task", "model", "policy", "budget", "decoding", "extent", "runs")},
        "seeds": "SHA-256 of task, item and rollout",
        "grader": dict(result.grader),
        "tally": tally(result.grades),
        "pass_at_k": {str(k): pass_at_k(result.scores, k) for k in ks},
    }


# How it is written

LEGEND = (
    "Accuracy [95 % interval] (capped/empty/looping): pass@1, mean over rollouts, then over problems, with the percentile "
    "interval of a bootstrap over problems; the share of rollouts, in percent, that hit the limit of new tokens, wrote "
    "nothing, or ended in a loop. Rel. is the ratio of the average to the teacher's. CR is the share of a dense cache of "
    "{context} tokens that is not held. A cache that grows stands under the share of its own tokens that it is to drop; what "
    "it held is counted at the end of rollouts, a KV head, where others have their slots at any length. An interval without "
    "width means that all problems scored alike, not that the value is certain. {missing} is missing. * is not the whole "
    "task, see the notes."
)


def _number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _interval(given: Mapping[str, Any] | None, star: str = "") -> str:
    if given is None or given["value"] is None:
        return MISSING
    if given["low"] is None and given["high"] is None:
        return _number(given["value"]) + star
    low, high = _number(given["low"]), "inf" if given["high"] is None else _number(given["high"])
    return f"{_number(given['value'])}{star} [{low}, {high}]"


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return MISSING
    t = cell["tally"]
    shares = "/".join(f"{100 * t[name] / t['rollouts']:.1f}" for name in ("capped", "empty", "loops"))
    return f"{_interval(cell['score'], '*' if cell['shortfalls'] else '')} ({shares})"


def _grid(table: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Header and lines of a table: ("group", [its title]), ("ours", cells) or ("paper", cells)."""
    count = len(table["columns"])
    header = ["Variant", *(column["title"] for column in table["columns"]), "Average Abs.", "Rel."]
    lines: list[tuple[str, list[str]]] = []
    group: float | None = 0.0
    for row in table["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines.append(("group", [f"CR={_percent(group)}" if group is not None else "CR unknown"]))
        cells = [_cell(cell) for cell in row["cells"]]
        star = "*" if any(cell and cell["shortfalls"] for cell in row["cells"]) else ""
        lines.append(
            ("ours", [row["label"], *cells, *(_interval(row[name], star) for name in ("average", "relative"))])
        )
        if row["paper"] is not None:
            figures = [_number(x, 2) for x in row["paper"]]
            figures += [MISSING] * (count + 2 - len(figures))
            lines.append(("paper", ["paper", *figures]))
    return header, lines


def _said(result: Mapping[str, Any]) -> str:
    """Where a result came from, in one line."""
    model, policy, budget, decoding = (result[name] for name in ("model", "policy", "budget", "decoding"))
    task, extent, last = result["task"], result["extent"], result["runs"][-1] if result["runs"] else {}
    size = "a cache that grows" if budget["bytes"] is None else f"{budget['bytes']:,} bytes a sequence"
    slots = "no fixed slots" if budget["slots"] is None else f"{budget['slots']:,} slots a KV head"
    thinking = {None: "", True: ", thinking on", False: ", thinking off"}[decoding.get("thinking")]
    source = task["source"]
    origin = "made items" if source is None else f"{source['hub']} at {source['revision']} ({source['licence']})"
    said = [
        f"{result['method']} on {task['title']}, {result['directory']}: model {model['id']}, revision "
        f"{model['revision'] or 'unknown'}, weights {model['weights']}, {model['dtype']}",
        f"policy {policy['name']}, adapter {policy['adapter'] or 'none'}",
        f"{slots}, {size}",
        f"{extent['items']} problems x {extent['rollouts']} rollouts, temperature {decoding['temperature']:g}, top-p "
        f"{decoding['top_p']:g}, top-k {decoding['top_k']}, at most {decoding['max_new_tokens']:,} new tokens{thinking}",
        f"seeds: {result['seeds']}",
        f"items: {origin}, checksum {task['checksum'] or 'none'}, prompts {task['prompts']}",
        f"grader {result['grader'].get('grader')}",
        "outcomes: "
        + ", ".join(f"{count} {name}" for name, count in result["tally"].items() if name in SHOWN and count),
        *(f"pass@{k} {value:.3f}" for k, value in list(result["pass_at_k"].items())[-1:]),
    ]
    if last:
        said.append(", ".join(f"{name} {version}" for name, version in last["versions"].items()))
        said.append(f"device {last['device']}")
        said.append(f"command: {shlex.join(last['command'])}")
    if len(result["runs"]) > 1:
        said.append(f"made by {len(result['runs'])} runs, of which this is the last")
    return "; ".join(said) + "."


SHOWN = ("right", "wrong", "no answer", "timeout", "refused")


def _remarks(report: Mapping[str, Any]) -> list[str]:
    bootstrap = report["bootstrap"]
    return [
        LEGEND.format(context=f"{report['context']:,}", missing=MISSING),
        f"Intervals: {bootstrap['draws']:,} draws, seed {bootstrap['seed']}. Lines called paper: {report['paper']}.",
    ]


def markdown(report: Mapping[str, Any]) -> str:
    def clean(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines: list[str] = []
    for table in report["tables"]:
        header, rows = _grid(table)
        number = f"Table {table['number']}: " if table["number"] else ""
        lines += [f"## {number}{clean(table['title'])}", ""]
        lines += [f"| {' | '.join(map(clean, header))} |", "|---|" + "---:|" * (len(header) - 1)]
        for kind, cells in rows:
            cells = [clean(cell) for cell in cells]
            if kind == "group":
                cells = [f"**{cells[0]}**", *[""] * (len(header) - 1)]
            elif kind == "paper":
                cells = [f"*{cell}*" for cell in cells]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(f"- {clean(said)}" for said in (*table["notes"], *table["sentences"])), ""]
    lines += [*(f"{remark}\n" for remark in _remarks(report)), "## Where it came from", ""]
    lines += [f"- {clean(_said(result))}" for result in report["results"]]
    if report["command"]:
        lines += ["", f"Report: {clean(shlex.join(report['command']))}"]
    return "\n".join(lines) + "\n"


SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", **{c: f"\\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def escaped(text: str) -> str:
    """Plain text for LaTeX."""
    return "".join(SPECIAL.get(c, c) for c in text.replace("\n", " "))


def latex(report: Mapping[str, Any]) -> str:
    """Tables for a document that loads booktabs."""
    lines = [r"% needs \usepackage{booktabs}"]
    for table in report["tables"]:
        header, rows = _grid(table)
        lines += [
            r"\begin{table}",
            rf"\caption{{{escaped(table['title'])}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(map(escaped, header)) + r" \\",
            r"\midrule",
        ]
        for kind, cells in rows:
            if kind == "group":
                lines += [r"\midrule", rf"\multicolumn{{{len(header)}}}{{l}}{{{escaped(cells[0])}}} \\"]
            else:
                texts = [rf"\textit{{{escaped(c)}}}" if kind == "paper" else escaped(c) for c in cells]
                lines.append(" & ".join(texts) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        lines += [*_list([*table["notes"], *table["sentences"]]), ""]
    lines += [f"{escaped(remark)}\n" for remark in _remarks(report)]
    lines += _list([_said(result) for result in report["results"]])
    if report["command"]:
        lines.append(f"Report: {escaped(shlex.join(report['command']))}")
    return "\n".join(lines) + "\n"


def _list(texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield r"\begin{itemize}"
        yield from (rf"\item {escaped(text)}" for text in texts)
        yield r"\end{itemize}"
