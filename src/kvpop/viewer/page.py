"""The page of the viewer: markup, style, script. ``@@NAME@@`` is filled in once."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>@@TITLE@@</title>
<style>@@STYLE@@</style>
</head>
<body>
<header>
  <div class="row">
    <label>text <select id="text"></select></label>
    <label>policy <select id="policy"></select></label>
    <span id="facts" class="quiet"></span>
    <span class="gap"></span>
    <button id="theme" type="button" title="light, dark, or as the system has it">theme: auto</button>
  </div>
  <div class="row">
    <label class="wide">query at <input id="q" type="range" min="0" value="0" step="1" aria-label="query position"></label>
    <input id="number" type="number" min="0" value="0" aria-label="query position">
    <span class="group" role="group" aria-label="step the query position">
      <button type="button" data-step="-64" aria-label="64 back">&minus;64</button>
      <button type="button" data-step="-1" aria-label="1 back">&minus;1</button>
      <button type="button" data-step="1" aria-label="1 on">+1</button>
      <button type="button" data-step="64" aria-label="64 on">+64</button>
    </span>
    <span class="group" role="search">
      <input id="search" type="search" placeholder="find in the text" aria-label="find in the text">
      <button id="before" type="button" aria-label="match before">&uarr;</button>
      <button id="after" type="button" aria-label="next match">&darr;</button>
    </span>
    <span id="found" class="quiet" role="status"></span>
  </div>
  <canvas id="overview" height="60" role="img"
    aria-label="Overview: layers down, the text along; the brighter, the more heads hold a token at the query"></canvas>
</header>
<main>
  <div id="tokens" role="listbox" tabindex="0" aria-label="tokens; arrow keys move, Enter sets the query here"></div>
  <aside>
    <section aria-label="the token">
      <h2 id="token">no token chosen</h2>
      <p id="told" aria-live="polite">Point at a token, or move with the arrow keys.</p>
    </section>
    <section>
      <h3>layers &times; heads at the query</h3>
      <div id="grid" role="img" aria-label="which heads hold the token"></div>
    </section>
    <section>
      <h3>heads that hold it, by layer, until the end</h3>
      <canvas id="life" height="150" role="img"
        aria-label="how many heads of each layer hold the token at every later query"></canvas>
      <div class="ends quiet"><span id="from"></span><span id="to"></span></div>
    </section>
    <section class="quiet">
      <div class="ends"><span>held by no head</span><span>by all</span></div>
      <div id="scale" aria-hidden="true"></div>
      <p>Grey: dropped everywhere. Slanted: not yet read. Framed: the query.
      Keys: arrows, Home, End, Page Up and Down; Enter sets the query, [ and ] step it, / finds, n and N go on.</p>
    </section>
  </aside>
</main>
<script type="application/json" id="data">@@DATA@@</script>
<script>@@SCRIPT@@</script>
</body>
</html>
"""

STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1a1a1a;--quiet:#5b5b5b;--dead:#8d8d8d;--line:#d4d4d4;--soft:#f4f4f4;
--hold:0 114 178;--strength:.62;--mark:#d55e00;--find:#f0c000}
:root[data-theme=dark]{--back:#16181b;--ink:#ececec;--quiet:#a9adb3;--dead:#7a7f86;--line:#3a3f45;--soft:#202327;
--hold:86 180 233;--strength:.72;--mark:#ff9d4d;--find:#f0e442}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--back:#16181b;--ink:#ececec;--quiet:#a9adb3;--dead:#7a7f86;
--line:#3a3f45;--soft:#202327;--hold:86 180 233;--strength:.72;--mark:#ff9d4d;--find:#f0e442}}
:root[data-theme=light]{color-scheme:light}:root[data-theme=dark]{color-scheme:dark}
*{box-sizing:border-box}html,body{height:100%;margin:0}
body{display:flex;flex-direction:column;background:var(--back);color:var(--ink);font:14px/1.4 system-ui,sans-serif}
header{padding:8px 12px;border-bottom:1px solid var(--line);background:var(--soft)}
.row{display:flex;flex-wrap:wrap;align-items:center;gap:6px 12px;margin-bottom:6px}
.gap{flex:1}.wide{flex:1 1 260px;display:flex;align-items:center;gap:8px}.wide input{flex:1}
.group{display:inline-flex;gap:3px}.quiet{color:var(--quiet);font-size:13px}
button,select,input{font:inherit;color:inherit;background:var(--back);border:1px solid var(--line);border-radius:4px;
padding:2px 7px}
button{cursor:pointer}#number{width:7em}
:focus-visible{outline:2px solid var(--mark);outline-offset:1px}
canvas{display:block;width:100%;image-rendering:pixelated;border:1px solid var(--line);background:var(--back)}
#overview{height:60px;cursor:pointer}#life{height:150px}
main{flex:1;min-height:0;display:flex}
#tokens{flex:1;overflow:auto;padding:12px 16px;white-space:pre-wrap;overflow-wrap:anywhere;
font:14px/1.75 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;position:relative}
.chunk{min-height:1.75em;contain:layout}
.t{border-radius:2px;background:rgb(var(--hold) / calc(var(--a,0) * var(--strength)));cursor:default;padding:2px 0}
.t.dead{color:var(--dead)}.t.ahead{color:var(--dead);font-style:italic}
.t.query{outline:1.5px dashed var(--mark)}.t.hit{box-shadow:inset 0 -3px var(--find)}
.t.chosen{outline:2px solid var(--mark);outline-offset:0}
.t.end::before{content:"\\21b5";color:var(--dead)}.t.part::before{content:"\\25cc";color:var(--dead)}
aside{width:340px;flex:none;overflow:auto;border-left:1px solid var(--line);padding:10px 14px}
h2{font:600 15px/1.4 ui-monospace,Menlo,Consolas,monospace;margin:0 0 4px;white-space:pre-wrap;overflow-wrap:anywhere}
h3{font-size:13px;margin:12px 0 5px}p{margin:4px 0 8px}#told{min-height:4.2em}
#grid{display:grid;gap:1px;grid-template-columns:2.4em repeat(var(--heads),minmax(4px,1fr));font-size:9px;line-height:9px}
#grid b{font-weight:400;color:var(--quiet);text-align:right;padding-right:5px}
#grid i{background:transparent;border:1px solid var(--line);height:9px}
#grid i.on{background:rgb(var(--hold));border-color:rgb(var(--hold))}
.ends{display:flex;justify-content:space-between}
#scale{height:12px;border:1px solid var(--line);
background:linear-gradient(to right,rgb(var(--hold) / 0),rgb(var(--hold) / var(--strength)))}
@media (max-width:760px){main{flex-direction:column}
aside{width:auto;max-height:45%;border-left:0;border-top:1px solid var(--line)}}
"""

SCRIPT = r"""
"use strict";
// What can be checked without a page. A life is expiry - t; lives hold all layers and heads of token 0 first.
const logic = {
  async unpack(value) {
    const text = atob(value.data), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const raw = await new Response(stream).arrayBuffer();
    return value.width === 2 ? new Uint16Array(raw) : new Uint32Array(raw);
  },
  // How many of X heads hold token t at query q; -1 if it is not read yet.
  count(lives, X, q, t) {
    if (t > q) return -1;
    let held = 0;
    for (let x = t * X, end = x + X, age = q - t; x < end; x++) if (lives[x] > age) held++;
    return held;
  },
  // Heads of every layer that hold token t at query q.
  byLayer(lives, L, H, q, t) {
    const found = new Array(L).fill(0);
    if (t <= q) for (let l = 0; l < L; l++) for (let h = 0; h < H; h++) if (lives[(t * L + l) * H + h] > q - t) found[l]++;
    return found;
  },
  // The query at which the last head drops token t, or S if one holds it to the end.
  lastHeld(lives, X, S, t) {
    let most = 0;
    for (let x = t * X; x < (t + 1) * X; x++) if (lives[x] > most) most = lives[x];
    return Math.min(S, t + most);
  },
  // Bounds of pieces of about `size` tokens that end where lines end, if there is a line end before twice the size.
  pieces(strings, size) {
    const bounds = [0];
    for (let t = 0, from = 0; t < strings.length; t++) {
      const n = t + 1 - from;
      if (t + 1 === strings.length || (n >= size && strings[t].endsWith("\n")) || n >= 2 * size) {
        bounds.push(t + 1);
        from = t + 1;
      }
    }
    return bounds;
  },
  // First and last token of every place where the text holds the query, whatever the case, past the bounds of tokens.
  search(strings, query) {
    const wanted = query.toLowerCase(), found = [];
    if (!wanted) return found;
    const low = strings.map((s) => s.toLowerCase()), starts = [];
    let at = 0;
    for (const s of low) { starts.push(at); at += s.length; }
    const whole = low.join("");
    const owner = (place) => {
      let a = 0, b = starts.length - 1;
      while (a < b) { const m = (a + b + 1) >> 1; if (starts[m] <= place) a = m; else b = m - 1; }
      return a;
    };
    for (let i = whole.indexOf(wanted); i >= 0; i = whole.indexOf(wanted, i + 1))
      found.push([owner(i), owner(i + wanted.length - 1)]);
    return found;
  },
  // Mean share of heads by layer and bin of tokens at query q, [L * bins]; tokens ahead are NaN.
  overview(lives, L, H, S, q, bins) {
    const sums = new Float64Array(L * bins), counts = new Float64Array(bins);
    for (let t = 0; t < S; t++) {
      if (t > q) continue;
      const bin = Math.floor(t * bins / S), age = q - t;
      counts[bin]++;
      for (let l = 0, x = t * L * H; l < L; l++) for (let h = 0; h < H; h++, x++) if (lives[x] > age) sums[l * bins + bin]++;
    }
    for (let i = 0; i < sums.length; i++) { const n = counts[i % bins]; sums[i] = n ? sums[i] / (n * H) : NaN; }
    return sums;
  },
  shown(string) {
    if (string === "") return "(part of a character)";
    return JSON.stringify(string).slice(1, -1).replace(/\\"/g, '"').replace(/\\\\/g, "\\");
  },
};

function start(document, window) {
  const data = JSON.parse(document.getElementById("data").textContent);
  const L = data.layers.length, H = data.heads, X = L * H, SIZE = 256;
  const $ = (id) => document.getElementById(id);
  const box = $("tokens"), grid = $("grid"), cells = [];
  let strings = [], lives = null, S = 0, q = 0, chosen = -1, pinned = false, wanted = 0;
  let bounds = [], chunks = [], spans = new Map(), hits = [], hit = -1, marked = new Set(), waiting = false;

  for (const [id, list] of [["text", data.texts], ["policy", data.subjects]]) {
    list.forEach((item, i) => {
      const option = document.createElement("option");
      option.value = String(i);
      option.textContent = item.name;
      $(id).append(option);
    });
  }
  grid.style.setProperty("--heads", String(H));
  for (let l = 0; l < L; l++) {
    const name = document.createElement("b");
    name.textContent = String(data.layers[l]);
    grid.append(name);
    for (let h = 0; h < H; h++) { const cell = document.createElement("i"); cells.push(cell); grid.append(cell); }
  }

  // Chunks of the text are filled when they come near the screen, and emptied when they are far.
  const watcher = typeof window.IntersectionObserver === "function"
    ? new window.IntersectionObserver((entries) => {
        for (const entry of entries) entry.isIntersecting ? fill(entry.target.index) : empty(entry.target.index);
      }, { root: box, rootMargin: "1200px 0px" })
    : null;

  function fill(c) {
    const chunk = chunks[c];
    if (!chunk || chunk.full) return;
    chunk.full = true;
    const parts = [];
    for (let t = bounds[c]; t < bounds[c + 1]; t++) {
      const span = document.createElement("span");
      span.id = "t" + t;
      span.token = t;
      span.textContent = strings[t];
      span.setAttribute("role", "option");
      span.setAttribute("aria-posinset", String(t + 1));
      span.setAttribute("aria-setsize", String(S));
      spans.set(t, span);
      parts.push(span);
      paint(t);
    }
    chunk.replaceChildren(...parts);
    chunk.style.height = "";
  }

  function empty(c) {
    const chunk = chunks[c];
    if (!chunk.full || (chosen >= bounds[c] && chosen < bounds[c + 1])) return;
    chunk.style.height = chunk.offsetHeight + "px";
    chunk.full = false;
    chunk.replaceChildren();
    for (let t = bounds[c]; t < bounds[c + 1]; t++) spans.delete(t);
  }

  function chunkOf(t) {
    let a = 0, b = chunks.length - 1;
    while (a < b) { const m = (a + b + 1) >> 1; if (bounds[m] <= t) a = m; else b = m - 1; }
    return a;
  }

  function paint(t) {
    const span = spans.get(t), held = lives ? logic.count(lives, X, q, t) : 0, s = strings[t];
    span.className = "t" + (held === 0 ? " dead" : held < 0 ? " ahead" : "") + (t === q ? " query" : "")
      + (t === chosen ? " chosen" : "") + (marked.has(t) ? " hit" : "") + (s === "" ? " part" : s.includes("\n") ? " end" : "");
    span.style.setProperty("--a", String(held > 0 ? (0.12 + 0.88 * held / X).toFixed(3) : 0));
    span.setAttribute("aria-selected", String(t === chosen));
  }

  function soon() {
    if (waiting) return;
    waiting = true;
    window.requestAnimationFrame(() => { waiting = false; for (const t of spans.keys()) paint(t); tell(); sketch(); });
  }

  function setQuery(value) {
    q = Math.max(0, Math.min(S - 1, Math.round(Number(value) || 0)));
    $("q").value = $("number").value = String(q);
    soon();
  }

  function choose(t, scroll) {
    const old = chosen;
    chosen = Math.max(0, Math.min(S - 1, t));
    fill(chunkOf(chosen));
    for (const one of [old, chosen]) if (spans.has(one)) paint(one);
    box.setAttribute("aria-activedescendant", "t" + chosen);
    if (scroll) spans.get(chosen).scrollIntoView({ block: "nearest" });
    tell();
  }

  function tell() {
    if (chosen < 0 || !lives) return;
    const t = chosen, layers = logic.byLayer(lives, L, H, q, t), held = layers.reduce((a, b) => a + b, 0);
    const last = logic.lastHeld(lives, X, S, t);
    $("token").textContent = t + "  " + logic.shown(strings[t]);
    $("told").textContent = t > q
      ? "The query at " + q + " stands before this token."
      : "At query " + q + ", " + (q - t) + " tokens on: held by " + held + " of " + X + " heads, in "
        + layers.filter((n) => n).length + " of " + L + " layers. "
        + (last >= S ? "Some head holds it to the end." : "The last head drops it at query " + last + ".");
    grid.setAttribute("aria-label", "heads that hold the token, by layer: "
      + layers.map((n, l) => data.layers[l] + ": " + n).join(", "));
    for (let x = 0; x < X; x++) {
      const end = t + lives[t * X + x];
      cells[x].className = t <= q && end > q ? "on" : "";
      cells[x].title = "layer " + data.layers[Math.floor(x / H)] + ", head " + (x % H) + ": "
        + (end >= S ? "held to the end" : "dropped at query " + end + ", " + (end - t) + " tokens on");
    }
    drawLife(t);
  }

  const colour = (name) => window.getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function canvas(id, width, height) {
    const element = $(id), context = element.getContext ? element.getContext("2d") : null;
    if (!context) return null;
    element.width = width;
    element.height = height;
    return context;
  }

  function drawLife(t) {
    const columns = Math.max(1, Math.min(S - t, 312)), context = canvas("life", columns, L);
    $("from").textContent = "query " + t;
    $("to").textContent = String(S - 1);
    if (!context) return;
    const hold = colour("--hold");
    for (let i = 0; i < columns; i++) {
      const at = t + (columns > 1 ? Math.round(i * (S - 1 - t) / (columns - 1)) : 0);
      logic.byLayer(lives, L, H, at, t).forEach((n, l) => {
        if (n) { context.fillStyle = "rgb(" + hold + " / " + n / H + ")"; context.fillRect(i, l, 1, 1); }
      });
    }
    if (q >= t) {
      context.fillStyle = colour("--mark");
      context.fillRect(columns > 1 ? Math.round((q - t) * (columns - 1) / (S - 1 - t)) : 0, 0, 1, L);
    }
  }

  function sketch() {
    if (!lives) return;
    const bins = Math.min(S, 900), context = canvas("overview", bins, L);
    if (!context) return;
    const shares = logic.overview(lives, L, H, S, q, bins), hold = colour("--hold");
    for (let l = 0; l < L; l++) for (let i = 0; i < bins; i++) {
      const share = shares[l * bins + i];
      if (share > 0) { context.fillStyle = "rgb(" + hold + " / " + share.toFixed(3) + ")"; context.fillRect(i, l, 1, 1); }
    }
    context.fillStyle = colour("--mark");
    context.fillRect(Math.floor(q * bins / S), 0, 1, L);
  }

  async function show() {
    const turn = ++wanted, text = Number($("text").value || 0), policy = Number($("policy").value || 0);
    const fresh = await logic.unpack(data.lives[policy][text]);
    if (turn !== wanted) return;  // another choice was made meanwhile
    const subject = data.subjects[policy], same = strings === data.texts[text].strings;
    lives = fresh;
    $("facts").textContent = [
      data.model, data.texts[text].strings.length.toLocaleString("en") + " tokens", L + " layers × " + H + " KV heads",
      (subject.slots ? subject.slots + " slots: " : "") + subject.sinks + " sinks, window " + subject.window,
    ].join(", ");
    if (!same) {
      strings = data.texts[text].strings;
      S = strings.length;
      chosen = -1;
      spans.clear();
      bounds = logic.pieces(strings, SIZE);
      if (watcher) watcher.disconnect();
      chunks = bounds.slice(1).map((end, c) => {
        const chunk = document.createElement("div");
        chunk.className = "chunk";
        chunk.index = c;
        chunk.setAttribute("role", "presentation");
        chunk.style.height = Math.ceil((end - bounds[c]) / 16) * 25 + "px";
        return chunk;
      });
      box.replaceChildren(...chunks);
      for (const id of ["q", "number"]) $(id).max = String(S - 1);
      find();
      setQuery(S - 1);
      if (watcher) chunks.forEach((chunk) => watcher.observe(chunk)); else chunks.forEach((_, c) => fill(c));
    }
    soon();
  }

  function find() {
    hits = logic.search(strings, $("search").value);
    hit = -1;
    marked = new Set();
    for (const [a, b] of hits) for (let t = a; t <= b; t++) marked.add(t);
    $("found").textContent = $("search").value ? hits.length + (hits.length === 1 ? " match" : " matches") : "";
    soon();
  }

  function go(by) {
    if (!hits.length) return;
    hit = hit < 0 ? (by > 0 ? 0 : hits.length - 1) : (hit + by + hits.length) % hits.length;
    $("found").textContent = (hit + 1) + " of " + hits.length;
    pinned = true;
    choose(hits[hit][0], true);
  }

  // The token a line above or below, nearest to where this one stands.
  function line(t, by) {
    const here = spans.get(t).getClientRects()[0], middle = here.left + here.width / 2;
    let best = t, gap = Infinity, top = null;
    for (let i = t + by; i >= 0 && i < S; i += by) {
      fill(chunkOf(i));
      const box = spans.get(i).getClientRects()[0];
      if (!box || (by < 0 ? box.top > here.top - 4 : box.top < here.top + 4)) continue;
      if (top === null) top = box.top;
      if (Math.abs(box.top - top) > 4) break;
      const away = Math.abs(box.left + box.width / 2 - middle);
      if (away < gap) { gap = away; best = i; }
    }
    return best;
  }

  const moves = {
    ArrowLeft: (t) => t - 1, ArrowRight: (t) => t + 1, ArrowUp: (t) => line(t, -1), ArrowDown: (t) => line(t, 1),
    Home: () => 0, End: () => S - 1, PageUp: (t) => t - 200, PageDown: (t) => t + 200,
  };
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) { pinned = true; choose(chosen < 0 ? 0 : moves[event.key](chosen), true); }
    else if ((event.key === "Enter" || event.key === " ") && chosen >= 0) setQuery(chosen);
    else if (event.key === "Escape") pinned = false;
    else return;
    event.preventDefault();
  });
  box.addEventListener("pointerover", (event) => {
    if (!pinned && event.target.token !== undefined) choose(event.target.token, false);
  });
  box.addEventListener("click", (event) => {
    if (event.target.token === undefined) return;
    pinned = !(pinned && event.target.token === chosen);
    choose(event.target.token, false);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName || "")) return;
    if (event.key === "[") setQuery(q - 1);
    else if (event.key === "]") setQuery(q + 1);
    else if (event.key === "/") $("search").focus();
    else if (event.key === "n") go(1);
    else if (event.key === "N") go(-1);
    else return;
    event.preventDefault();
  });
  $("text").addEventListener("change", show);
  $("policy").addEventListener("change", show);
  $("q").addEventListener("input", () => setQuery($("q").value));
  $("number").addEventListener("change", () => setQuery($("number").value));
  for (const button of document.querySelectorAll("[data-step]"))
    button.addEventListener("click", () => setQuery(q + Number(button.dataset.step)));
  $("search").addEventListener("input", find);
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { go(event.shiftKey ? -1 : 1); event.preventDefault(); }
    if (event.key === "Escape") box.focus();
  });
  $("before").addEventListener("click", () => go(-1));
  $("after").addEventListener("click", () => go(1));
  $("overview").addEventListener("click", (event) => {
    pinned = true;
    choose(Math.floor(event.offsetX / $("overview").clientWidth * S), true);
  });
  const themes = ["auto", "light", "dark"];
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "auto", next = themes[(themes.indexOf(now) + 1) % 3];
    document.documentElement.dataset.theme = next;
    $("theme").textContent = "theme: " + next;
    soon();
  });
  show().catch((error) => { $("told").textContent = "This browser cannot show the data: " + error; });
  return { get: () => ({ q, chosen, S, lives, hits, chunks, spans }), setQuery, choose, find, go };
}

if (typeof module === "object") module.exports = { logic, start }; else start(document, window);
"""
