"""The page: its data are the arrays, its texts cannot leave their place, its script does what it says (with node)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from kvpop.analysis import Analysis, Subject, Text, Trace
from kvpop.analysis.quantities import held, retention_map
from kvpop.viewer import packed, unpacked, viewer, write_viewer
from kvpop.viewer.page import SCRIPT

L, H, S = 3, 2, 700
ODD = (
    "</script>", "<!--", "<script>alert(1)</script>", "&amp;", "\n\n", "𝛼", "", "\u2028", '"\\', "漢", "@@SCRIPT@@", "\x00",
    "İx",
)  # fmt: skip


def made(name: str, strings: tuple[str, ...], heads: int = H, seed: int = 0) -> tuple[Text, list[Trace]]:
    n, rng = len(strings), np.random.default_rng(seed)
    expiries = [np.minimum(np.arange(n) + rng.integers(1, n, size=(L, heads, n)), n).astype(np.int32) for _ in range(2)]
    recall = np.zeros((L, heads), np.float32)
    return Text(name, np.arange(n, dtype=np.int32), strings), [Trace(expiry, recall) for expiry in expiries]


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    plain = tuple("\n" if t % 90 == 89 else f" token{t}" for t in range(S - len(ODD)))
    pairs = [made("one <b>", (*ODD, *plain)), made("two", ODD * 3, seed=1)]
    subjects = [
        Subject(name, "random", 20, 2, 8, np.full((L, H), 10, np.int32)) for name in ("kvpop </script>", "b & c")
    ]
    return Analysis(
        model="a<b>&c", layers=(0, 2, 5), heads=H, sinks=2, window=8, long=10, min_future=20,
        texts=[text for text, _ in pairs], subjects=subjects, traces=[[traces[i] for _, traces in pairs] for i in range(2)],
        mass=[np.zeros((L, H, len(text)), np.float32) for text, _ in pairs], versions={},
    )  # fmt: skip


class Page(HTMLParser):
    """What a browser takes for elements, and what the scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.inside: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(dict(attributes).get("id") or tag)

    def handle_endtag(self, tag):
        if self.inside:
            self.inside.pop()

    def handle_data(self, data):
        if self.inside:
            self.texts.setdefault(self.inside[-1], []).append(data)


@pytest.fixture(scope="module")
def page(analysis) -> str:
    return viewer(analysis)


@pytest.mark.parametrize("far", [0, 100_000])
def test_packing_loses_nothing(far):
    rng = np.random.default_rng(0)
    expiry = np.minimum(np.arange(50) + rng.integers(1, 50, size=(L, H, 50)), 50).astype(np.int32)
    expiry[0, 0, 0] += far
    value = packed(expiry)
    assert value["width"] == (4 if far else 2)
    assert (unpacked(value, L, H) == expiry).all()


def test_the_page_holds_the_analysis(analysis, page):
    parsed = Page(page)
    data = json.loads("".join(parsed.texts["data"]))
    assert data["layers"] == [0, 2, 5]
    assert (data["model"], data["heads"]) == ("a<b>&c", H)
    for text, got in zip(analysis.texts, data["texts"]):
        assert (got["name"], got["strings"]) == (text.name, list(text.strings))
    for row, traces in zip(data["lives"], analysis.traces):
        for value, trace in zip(row, traces):
            assert (unpacked(value, L, H) == trace.expiry_LHS).all()


def test_nothing_of_the_texts_is_markup(page):
    parsed = Page(page)
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == 2
    assert page.count("</script>") == 2
    assert "".join(parsed.texts["title"]) == "kvpop: what is held of 2 texts (a<b>&c)"
    assert "".join(parsed.texts["script"]) == SCRIPT
    body = page[page.index('id="data">') + len('id="data">') :]
    assert not set("<>&") & set(body[: body.index("</script>")])
    assert body[: body.index("</script>")].isascii()
    assert "innerHTML" not in SCRIPT
    assert "insertAdjacent" not in SCRIPT


def test_the_page_needs_no_network(page):
    assert not re.search(r"https?:|[\"'(]//|url\(|@import|import\(|fetch\(|XMLHttp|<link|<img|<iframe", page)
    assert not [tag for tag, attributes in Page(page).tags if {"src", "href"} & attributes.keys()]
    policy = next(attributes["content"] for _, attributes in Page(page).tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy


def test_controls_have_names(page):
    """For those who hear the page: every control has a label or words of its own."""
    for tag, attributes in Page(page).tags:
        if tag == "input" or "role" in attributes or tag == "canvas":
            wrapped = attributes.get("role") in ("status", "search", "listbox") and attributes.get("role") != "listbox"
            assert "aria-label" in attributes or wrapped, (tag, attributes)
        if tag == "button" and not attributes.get("title"):
            assert attributes.get("aria-label"), attributes
    assert "prefers-color-scheme:dark" in page


def test_it_is_written_as_a_file(analysis, page, tmp_path):
    write_viewer(analysis, tmp_path / "new" / "viewer.html")
    assert (tmp_path / "new" / "viewer.html").read_text(encoding="utf-8") == page


# The script, in node.

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


def node(tmp_path, page: str, code: str):
    """What the code prints, as JSON; ``logic``, ``start`` and ``data`` come from the page."""
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    head = """
      const page = require("fs").readFileSync("page.html", "utf8");
      const parts = [...page.matchAll(/<script[^>]*>([^]*?)<\\/script>/g)].map((m) => m[1]);
      const data = JSON.parse(parts[0]);
      const holder = { exports: {} };
      new Function("module", parts[1])(holder);
      const { logic, start } = holder.exports;
      const print = (value) => console.log(JSON.stringify(value));
    """
    (tmp_path / "run.js").write_text(f"{head}\n(async () => {{ {code} }})();")
    run = subprocess.run([NODE, "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_node
def test_the_script_counts_as_the_arrays_say(analysis, page, tmp_path):
    queries = [0, 5, 300, S - 1]
    found = node(tmp_path, page, f"""
      const L = {L}, H = {H}, S = {S}, lives = await logic.unpack(data.lives[1][0]), out = [];
      for (const q of {queries}) out.push({{
        counts: [...Array(S).keys()].map((t) => logic.count(lives, L * H, q, t)),
        layers: [...Array(S).keys()].map((t) => logic.byLayer(lives, L, H, q, t)),
        overview: [...logic.overview(lives, L, H, S, q, 70)],
      }});
      print({{ out, last: [...Array(S).keys()].map((t) => logic.lastHeld(lives, L * H, S, t)) }});
    """)  # fmt: skip
    expiry = analysis.traces[1][0].expiry_LHS
    assert found["last"] == expiry.max((0, 1)).tolist()
    for q, got in zip(queries, found["out"]):
        total = held(expiry, q).sum((0, 1))
        assert got["counts"] == [int(total[t]) if t <= q else -1 for t in range(S)]
        assert np.array(got["layers"]).T.tolist() == retention_map(expiry, q).tolist()
        for bin in range(70):
            tokens = [t for t in range(S) if t * 70 // S == bin and t <= q]
            for layer in range(L):
                value = got["overview"][layer * 70 + bin]  # NaN is null in JSON
                expected = retention_map(expiry, q)[layer, tokens].mean() / H if tokens else None
                assert value == (None if expected is None else pytest.approx(expected))


@needs_node
def test_search_and_pieces(page, tmp_path):
    found = node(
        tmp_path,
        page,
        r"""
      const s = ["The", " ro", "ok", "\n", "", "THE rook", "İx", "𝛼"];
      const many = [...Array(1000).keys()].map((i) => (i % 70 === 0 ? "x\n" : "x"));
      print({
        rook: logic.search(s, "Rook"), the: logic.search(s, "the"), none: logic.search(s, "queen"), empty: logic.search(s, ""),
        alpha: logic.search(s, "𝛼"), bounds: logic.pieces(many, 100), one: logic.pieces(["a"], 100),
        plain: logic.pieces(Array(450).fill("x"), 100), shown: [logic.shown(" a\n"), logic.shown(""), logic.shown('"\\')],
      });
    """,
    )
    assert found["rook"] == [[1, 2], [5, 5]]
    assert found["the"] == [[0, 0], [5, 5]]
    assert (found["none"], found["empty"]) == ([], [])
    assert found["alpha"] == [[7, 7]]
    assert found["bounds"] == [0, *range(141, 1000, 140), 1000]  # the first line end after 100 tokens
    assert found["plain"] == [0, 200, 400, 450]
    assert found["one"] == [0, 1]
    assert found["shown"] == [" a\\n", "(part of a character)", '"\\']


STUB = """
  class Element {
    constructor(tag) { this.tag = tag; this.children = []; this.style = { setProperty: (k, v) => { this.style[k] = v; } };
      this.attributes = {}; this.dataset = {}; this.on = {}; this.value = ""; this.offsetHeight = 50; this.clientWidth = 100; }
    append(...items) { this.children.push(...items); }
    replaceChildren(...items) { this.children = items; }
    setAttribute(k, v) { this.attributes[k] = v; }
    addEventListener(k, f) { (this.on[k] ||= []).push(f); }
    fire(k, more = {}) { for (const f of this.on[k] || []) f({ preventDefault() {}, target: this, ...more }); }
    focus() {} scrollIntoView() { this.scrolled = true; }
    getClientRects() { return [{ left: (this.token % 10) * 10, width: 10, top: Math.floor(this.token / 10) * 20 }]; }
  }
  const elements = {}, step = new Element("button");
  step.dataset.step = "-64";
  const document = new Element("document");
  document.documentElement = new Element("html");
  document.getElementById = (id) => (elements[id] ||= new Element(id));
  document.createElement = (tag) => new Element(tag);
  document.querySelectorAll = () => [step];
  document.getElementById("data").textContent = parts[0];
  const window = { requestAnimationFrame: (f) => setTimeout(f, 0), getComputedStyle: () => ({ getPropertyValue: () => "" }) };
  const rest = () => new Promise((done) => setTimeout(done, 60));
  const $ = (id) => elements[id];
"""


@needs_node
def test_the_page_answers_keys_and_pointers(analysis, page, tmp_path):
    found = node(tmp_path, page, STUB + """
      const view = start(document, window), out = {};
      await rest();
      const span = (t) => view.get().spans.get(t);
      out.texts = [...Array(view.get().S).keys()].map((t) => span(t).textContent);
      out.start = [view.get().q, $("q").max, $("policy").children.map((o) => o.textContent)];
      $("q").value = "300"; $("q").fire("input"); await rest();
      out.classes = [...Array(view.get().S).keys()].map((t) => span(t).className);
      step.fire("click"); await rest(); out.stepped = view.get().q;
      $("number").value = "9999"; $("number").fire("change"); await rest(); out.clipped = view.get().q;
      $("tokens").fire("pointerover", { target: span(40) });
      out.hovered = [view.get().chosen, $("told").textContent, $("grid").attributes["aria-label"]];
      $("tokens").fire("click", { target: span(40) });
      $("tokens").fire("pointerover", { target: span(50) }); out.pinned = view.get().chosen;
      for (const key of ["ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"]) $("tokens").fire("keydown", { key });
      out.back = view.get().chosen;
      $("tokens").fire("keydown", { key: "ArrowDown" }); out.down = view.get().chosen;
      $("tokens").fire("keydown", { key: "Enter" }); await rest(); out.entered = view.get().q;
      $("tokens").fire("keydown", { key: "Home" }); $("tokens").fire("keydown", { key: "ArrowLeft" });
      out.home = view.get().chosen;
      out.active = $("tokens").attributes["aria-activedescendant"];
      document.fire("keydown", { key: "]" }); out.bracket = view.get().q;
      $("search").value = "TOKEN12"; $("search").fire("input");
      out.found = $("found").textContent; $("after").fire("click"); $("after").fire("click");
      out.second = [view.get().chosen, $("found").textContent, span(view.get().chosen).scrolled];
      await rest(); out.hit = span(view.get().chosen).className;
      $("policy").value = "1"; $("policy").fire("change"); await rest(); out.kept = view.get().chosen;
      view.setQuery(300); await rest();
      out.other = [...Array(view.get().S).keys()].map((t) => Number(span(t).style["--a"]));
      $("text").value = "1"; $("text").fire("change"); await rest(); out.text = [view.get().S, view.get().q, view.get().chosen];
      $("theme").fire("click"); out.theme = document.documentElement.dataset.theme;
      print(out);
    """)  # fmt: skip
    assert found["texts"] == list(analysis.texts[0].strings)
    assert found["start"] == [S - 1, str(S - 1), ["kvpop </script>", "b & c"]]
    first, second = (traces[0].expiry_LHS for traces in analysis.traces)
    counts = held(first, 300).sum((0, 1))
    for t, name in enumerate(found["classes"]):
        assert ("dead" in name.split()) == (t <= 300 and counts[t] == 0)
        assert ("ahead" in name.split()) == (t > 300)
        assert ("query" in name.split()) == (t == 300)
    assert (found["stepped"], found["clipped"]) == (236, S - 1)
    number = int(held(first, S - 1)[..., 40].sum())
    assert found["hovered"][0] == 40
    assert f"held by {number} of {L * H} heads" in found["hovered"][1]
    by_layer = retention_map(first, S - 1)[:, 40]
    assert found["hovered"][2].endswith(
        ": ".join(["by layer", ", ".join(f"{a}: {n}" for a, n in zip((0, 2, 5), by_layer))])
    )
    assert (found["pinned"], found["back"], found["down"], found["entered"]) == (40, 40, 50, 50)
    assert (found["home"], found["active"], found["bracket"]) == (0, "t0", 51)
    hits = [t for t, string in enumerate(analysis.texts[0].strings) if "token12" in string]
    assert found["found"] == f"{len(hits)} matches"
    assert found["second"] == [hits[1], f"2 of {len(hits)}", True]
    assert {"hit", "chosen"} <= set(found["hit"].split())
    assert found["kept"] == hits[1]  # the same text under another policy
    share = held(second, 300).sum((0, 1)) / (L * H)
    assert found["other"] == pytest.approx(np.where(share > 0, 0.12 + 0.88 * share, 0).tolist(), abs=6e-4)
    assert found["text"] == [3 * len(ODD), 3 * len(ODD) - 1, -1]
    assert found["theme"] == "light"
