"use strict";
// Draws the timeline as SVG, from the data of timeline_data.py: ranks down, time across. Only what is in sight is
// drawn, bars of one colour in a row as one path. The legend has what is drawn.
(() => {
  const box = document.getElementById("timeline");
  const D = JSON.parse(document.getElementById("data").textContent),
    N = D.ranks.length;
  const sum = steps => {
    let at = 0;
    return steps.map(step => (at += step));
  };
  const S = { ...D.slices, begin: sum(D.slices.begin), seq: sum(D.slices.seq) };
  const CREATED = 1,
    STARTED = 2,
    FAILED = 4,
    LOST = ["killed", "stopped"];
  const kind = k => {
    const [call, group, frame, state, marked, peer] = D.kinds[S.kind[k]];
    return { call, group, frame, state, marked, peer };
  };
  const unfinished = k => {
    const s = D.kinds[S.kind[k]][3];
    return s === CREATED || s === STARTED;
  };
  const ofFault = k => D.kinds[S.kind[k]][4] || unfinished(k);
  const colour = call => Math.min(D.colours[call], 7);
  const ROW = N <= 16 ? 30 : N <= 32 ? 22 : 16,
    DENSE = ROW < 20,
    AXIS = 28,
    PAD = DENSE ? 2 : 4,
    LEFT = 84;
  const height = AXIS + N * ROW + 2,
    whole = Math.max(D.span, 1) * 1.01;
  let from = 0,
    to = whole,
    selected = null,
    drag = null,
    scene;

  const SVG = document.querySelector(".verdict svg").namespaceURI;
  const make = (name, attributes = {}, text) => {
    const one = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const html = (name, attributes = {}, text = "") => {
    const one = Object.assign(document.createElement(name), attributes);
    one.append(text);
    return one;
  };
  const ruler = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.body).fontFamily;
  const widths = new Map();
  const measured = (text, size = DENSE ? 10.5 : 12) => {
    if (!widths.has(text)) {
      ruler.font = `550 ${size}px ${family}`;
      widths.set(text, ruler.measureText(text).width);
    }
    return widths.get(text);
  };
  // A time, given in tenths of a microsecond, with as many digits as distinguish it from one that is `apart` from it.
  const unit = (tenths, apart) => {
    const us = tenths / 10,
      size = Math.abs(us);
    const digits = apart ? Math.min(15, Math.max(3, Math.ceil(Math.log10((size * 10) / apart)) + 2)) : 3;
    for (const [n, u] of [
      [6e7, "min"],
      [1e6, "s"],
      [1e3, "ms"],
      [1, "µs"],
    ])
      if (size >= n) return +(us / n).toPrecision(digits) + " " + u;
    return us ? Math.round(us * 1e3) + " ns" : "0";
  };
  const width = () => box.clientWidth;
  const x = time => LEFT + ((time - from) / (to - from)) * (width() - LEFT);

  // --- drawing ---
  const MEANINGS = {
    pale: "pale: waits for the last rank",
    bad: "unfinished or failed, of a culprit",
    warn: "unfinished or failed, of others",
    marked: "the operation of the fault",
    absent: "has not joined",
    since: "the fault begins",
    culprit: "culprit",
    victim: "victim",
  };
  function swatch(key) {
    const icon = make("svg", { "aria-hidden": "true", width: 16, height: 12, viewBox: "0 0 16 12" });
    const area = { x: 0.8, y: 0.8, width: 14.4, height: 10.4, rx: 2 };
    if (key.startsWith("op")) icon.append(make("rect", { ...area, class: key }));
    else if (key === "pale") icon.append(make("rect", { ...area, class: "pale" }));
    else if (key === "bad" || key === "warn")
      icon.append(
        make("rect", { ...area, class: "open " + key }),
        make("rect", { ...area, fill: `url(#stripes-${key})` }),
      );
    else if (key === "since") icon.append(make("path", { class: "since", d: "M8 0V12" }));
    else if (key === "culprit" || key === "victim")
      icon.append(sign(key === "culprit" ? "bad" : "warn", 8, 6));
    else icon.append(make("rect", { ...area, class: key }));
    return icon;
  }
  const sign = (tone, at, y) =>
    tone === "bad"
      ? make("path", { class: "sign bad", d: `M${at - 3.5} ${y - 3.5}l7 7m0 -7l-7 7` })
      : make("circle", { class: "sign warn", cx: at, cy: y, r: 3.4 });
  function showLegend(used) {
    const order = [...D.ops.keys()]
      .slice(0, 8)
      .map(i => "op" + i)
      .concat(Object.keys(MEANINGS))
      .filter(key => used.has(key));
    const meaning = key =>
      MEANINGS[key] || (key === "op7" && D.ops.length > 8 ? "other operations" : D.ops[+key.slice(2)]);
    legend.replaceChildren(
      ...order.map(key => {
        const item = html("li");
        item.dataset.key = key;
        item.append(swatch(key), meaning(key));
        return item;
      }),
    );
  }

  function draw() {
    const w = width(),
      used = new Set(),
      back = make("g"),
      bars = make("g"),
      front = make("g");
    const use = (key, one) => {
      used.add(key);
      return one;
    };
    const svg = scene;
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${w} ${height}`);
    // the axis
    const rough = (to - from) / Math.max(2, (w - LEFT) / 110),
      ten = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(n => n * ten).find(size => size >= rough);
    const since = D.since !== null && D.since >= from && D.since <= to ? x(D.since) : null;
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const at = x(t),
        text = unit(t, step);
      back.append(make("path", { class: "grid", d: `M${at} ${AXIS - 6}V${height}` }));
      const clear = since === null || Math.abs(at - since) > 24 + measured(text, 11.5) / 2;
      if (at > LEFT + 18 && at < w - 28 && clear)
        back.append(make("text", { class: "tick", x: at, y: 11 }, text));
    }
    const labels = make("g");
    D.ranks.forEach((rank, i) => row(rank, AXIS + i * ROW, w, use, back, bars, labels));
    front.append(labels);
    if (since !== null) {
      bars.append(use("since", make("path", { class: "since", d: `M${since} ${AXIS - 8}V${height}` })));
      if (since > LEFT + 14 && since < w - 14)
        front.append(make("text", { class: "sincetext", x: since, y: 11 }, "fault"));
    }
    const clip = make("clipPath", { id: "drawn" });
    clip.append(make("rect", { x: LEFT, y: 0, width: Math.max(w - LEFT, 0), height }));
    bars.setAttribute("clip-path", "url(#drawn)");
    const stripes = ["bad", "warn"].map(tone => {
      const pattern = make("pattern", {
        id: "stripes-" + tone,
        width: 7,
        height: 7,
        patternUnits: "userSpaceOnUse",
        patternTransform: "rotate(45)",
      });
      pattern.append(make("path", { class: "stripes-" + tone, d: "M0 -1V8" }));
      return pattern;
    });
    const defs = make("defs");
    defs.append(clip, ...stripes);
    svg.replaceChildren(defs, back, bars, front);
    showSelected();
    showLegend(used);
    controls();
    tip.hidden = true; // its place may be another now
  }

  // The frame of the selected operation, which changes more often than the rest.
  function showSelected() {
    scene.querySelector(".selected")?.remove();
    if (selected === null) return;
    const { k, i } = selected,
      x0 = Math.max(x(S.begin[k]), LEFT),
      x1 = Math.min(x(S.begin[k] + S.last[k]), width());
    if (x1 < LEFT || x0 > width()) return;
    const area = { x: x0, y: AXIS + i * ROW + 1, width: Math.max(x1 - x0, 3), height: ROW - 2, rx: 2 };
    scene.append(make("rect", { class: "selected", ...area }));
  }

  function row(rank, top, w, use, back, bars, front) {
    const middle = top + ROW / 2,
      y = top + PAD,
      h = ROW - 2 * PAD,
      lost = LOST.includes(rank.note);
    if (rank.tone === "bad")
      back.append(make("rect", { class: "row-bad", x: 0, y: top, width: w, height: ROW }));
    back.append(make("path", { class: "grid", d: `M0 ${top + ROW}H${w}` }));
    back.append(make("text", { class: "rank " + rank.tone, x: LEFT - 26, y: middle }, "rank " + rank.rank));
    if (rank.tone)
      back.append(use(rank.tone === "bad" ? "culprit" : "victim", sign(rank.tone, LEFT - 14, middle)));
    const paths = new Map(),
      add = (key, x0, x1) =>
        paths.set(
          key,
          (paths.get(key) || "") + `M${x0.toFixed(1)} ${y}H${x1.toFixed(1)}v${h}H${x0.toFixed(1)}z`,
        );
    const labels = [];
    let last = -1,
      lastColour = -1,
      lastOpen = null,
      end = LEFT;
    for (let k = rank.from; k < rank.to; k++) {
      const begin = S.begin[k],
        over = begin + S.last[k];
      if (over < from || begin > to) continue;
      const { call, state, marked } = kind(k),
        c = colour(call),
        open = unfinished(k);
      const x0 = Math.max(x(begin), LEFT - 4),
        x1 = Math.min(Math.max(x(over), x(begin) + 1.2), w + 4);
      end = Math.max(end, x1);
      if (!open && state !== FAILED && x1 - x0 < 1.5 && x1 < last + 0.6 && c === lastColour) continue; // covers the same pixel
      last = x1;
      lastColour = c;
      if (labels.length) labels[labels.length - 1].next ??= x0;
      const name = D.ops[D.colours[call]] + " #" + S.seq[k],
        sight = Math.max(x0, LEFT);
      if (open || state === FAILED) {
        const tone = rank.tone === "bad" ? "bad" : "warn",
          told = state === FAILED ? ", failed" : lost ? `, process ${rank.note}` : "",
          area = { x: x0, y: y + 0.5, width: Math.max(x1 - x0, 1.5), height: h - 1, rx: 2 };
        bars.append(
          use(tone, make("rect", { ...area, class: "open " + tone })),
          make("rect", { ...area, fill: `url(#stripes-${tone})` }),
        );
        if (open) lastOpen = labels.length;
        labels.push({ text: name + told, short: name, at: sight + 4, room: x1 - sight - 8, tone, end: x1 });
      } else {
        const split = Math.min(Math.max(x(begin + S.wait[k]), x0), x1);
        if (split - x0 >= 1) {
          add(`op${c} pale${split - x0 < 4 ? "" : " edged"}`, x0, split);
          use("pale");
        }
        add("op" + c, Math.min(split, x1 - 0.8), x1);
        use("op" + c);
        const pale = split - sight > x1 - Math.max(split, LEFT),
          at = pale ? sight : Math.max(split, LEFT);
        labels.push({
          text: name,
          short: name,
          at: at + 3,
          room: (pale ? split : x1) - at - 6,
          style: pale ? "on-pale" : "on-full",
        });
      }
      if (marked && x1 - x0 > 3 && !DENSE)
        front.append(
          use(
            "marked",
            clipped(make("rect", { class: "marked", x: x0, y, width: x1 - x0, height: h, rx: 2 })),
          ),
        );
    }
    for (const [style, d] of paths) bars.append(make("path", { class: style, d }));
    for (const one of labels) {
      if (DENSE && one.tone !== "bad") continue;
      const fits = text => measured(text) <= one.room - 6;
      if (one.tone && !fits(one.short)) {
        // beside the bar, up to the next one
        one.at = one.end + 4;
        one.room = Math.min(one.next ?? w, w) - one.at - 6;
      }
      const text = fits(one.text) ? one.text : one.short,
        size = measured(text);
      if (!fits(text)) continue;
      if (one.tone) plated(front, one.at, middle, text, size, one.tone, h);
      else front.append(make("text", { class: one.style, x: one.at + 2, y: middle }, text));
    }
    if (rank.absent && D.since !== null && D.since <= to) {
      const x0 = Math.max(x(D.since), LEFT + 2);
      front.append(
        use(
          "absent",
          make("rect", {
            class: "absent",
            x: x0 + 0.5,
            y: y + 0.5,
            width: Math.max(w - x0 - 2, 1),
            height: h - 1,
            rx: 2,
          }),
        ),
      );
      const short = [rank.absent, rank.absent.split(", ").at(-1), "not in it"].find(
        t => measured(t) < w - x0 - 12,
      );
      if (short) plated(front, x0 + 3, middle, short, measured(short), "bad", ROW + 1);
    } else if (lastOpen === null && (rank.from === rank.to || lost || rank.note === "no file")) {
      const text =
        rank.note === "no file" ? "no file of this rank" : lost ? "process " + rank.note : "no operations";
      const size = measured(text);
      plated(
        front,
        Math.max(Math.min(end + 6, w - size - 12), LEFT + 2),
        middle,
        text,
        size,
        lost ? "bad" : "",
        h,
      );
    }
  }
  const clipped = one => {
    one.setAttribute("clip-path", "url(#drawn)");
    return one;
  };
  function plated(into, at, middle, text, size, tone, h) {
    into.append(
      make("rect", {
        class: "plate",
        x: at,
        y: middle - Math.min(h / 2 - 1.5, 9),
        width: size + 8,
        height: Math.min(h - 3, 18),
        rx: 3,
      }),
    );
    into.append(make("text", { class: tone ? "on-plate " + tone : "plain", x: at + 4, y: middle }, text));
  }

  // --- moving ---
  function clamp() {
    const size = Math.min(Math.max(to - from, Math.min(whole, 0.5)), whole);
    const begin = Math.min(Math.max((from + to) / 2 - size / 2, 0), whole - size);
    [from, to] = [begin, begin + size];
  }
  function zoom(factor, share = 0.5) {
    const at = from + share * (to - from);
    [from, to] = [at - (at - from) * factor, at + (to - at) * factor];
    clamp();
    draw();
  }
  // Around the fault: the last operations before the marked or stuck ones, which take a third of the width.
  function faultView() {
    let first = Infinity,
      last = -Infinity;
    for (let k = 0; k < S.begin.length; k++)
      if (ofFault(k)) {
        first = Math.min(first, S.begin[k]);
        last = Math.max(last, S.begin[k]);
      }
    if (first === Infinity) return null;
    const before = S.begin.filter(b => b < first).sort((a, b) => b - a),
      many = Math.max(N * 6, 12);
    const start = before.length ? before[Math.min(many, before.length) - 1] : 0;
    const size = Math.max(last - start, whole * 1e-6) * 1.5;
    const view = [Math.max(0, start - size * 0.01), Math.min(whole, start + size)];
    return view[1] - view[0] < whole * 0.9 ? view : null;
  }
  const fault = faultView();
  const same = (a, b) => Math.abs(a[0] - b[0]) + Math.abs(a[1] - b[1]) < 1e-6 * whole;
  const show = view => {
    [from, to] = view;
    clamp();
    draw();
  };

  // --- controls ---
  const tools = html("div", { className: "tools" }),
    views = html("span", { className: "switch" });
  const button = (text, act, name) => {
    const one = html("button", { type: "button" }, text);
    if (name) one.setAttribute("aria-label", name);
    one.addEventListener("click", act);
    return one;
  };
  const around = fault && button("Around the fault", () => show(fault));
  const all = button("Everything", () => show([0, whole]));
  const nearer = button("+", () => zoom(0.5), "zoom in"),
    farther = button("\u2212", () => zoom(2), "zoom out");
  if (around) views.append(around);
  views.append(all);
  const zooms = html("span", { className: "switch" });
  zooms.append(farther, nearer);
  function controls() {
    const everything = same([from, to], [0, whole]);
    views.hidden = all.hidden = everything && !around; // there is nothing else to see
    all.setAttribute("aria-pressed", everything);
    if (around) around.setAttribute("aria-pressed", same([from, to], fault));
    farther.disabled = everything;
    nearer.disabled = to - from <= 0.5;
  }
  tools.append(views, zooms);
  const legend = html("ul", { className: "legend" });
  legend.setAttribute("aria-label", "what the colours mean");
  const area = html("div", { className: "timeline" + (DENSE ? " dense" : ""), tabIndex: 0 });
  area.setAttribute("role", "group");
  area.setAttribute(
    "aria-label",
    "timeline: ranks down, time across; arrow keys select an operation, + and - zoom",
  );
  scene = make("svg", { class: "rows" + (DENSE ? " dense" : ""), "aria-hidden": "true" });
  const tip = html("div", { className: "tip", hidden: true });
  tip.setAttribute("aria-live", "polite");
  area.append(scene, tip);
  const hint = html(
    "p",
    { className: "note hint" },
    "Drag to move, Ctrl and wheel to zoom; arrow keys select an operation, + and - zoom.",
  );
  box.replaceChildren(tools, area, legend, hint);

  function describe(k) {
    const { call, group, frame, state, peer } = kind(k),
      text = D.states[state];
    const lines = [
      `rank ${selected.rank}: ${D.calls[call]}`,
      `#${S.seq[k]} of ${D.groups[group]}` + (peer >= 0 ? `, peer ${peer}` : ""),
    ];
    if (D.places[frame]) lines.push("at " + D.places[frame]);
    const waited = S.wait[k] >= 1 ? `, of which ${unit(S.wait[k])} waiting for the last rank` : "";
    lines.push(
      text
        ? text + (state === FAILED ? " after " : " for ") + unit(S.last[k])
        : `took ${unit(S.last[k])}${waited}`,
    );
    return lines.join("\n");
  }
  function select(found, px) {
    if (found && selected && found.k === selected.k && !tip.hidden) return;
    selected = found;
    tip.hidden = !found;
    showSelected();
    if (!found) return;
    tip.textContent = describe(found.k);
    tip.style.left = Math.max(0, Math.min(px + 12, width() - tip.offsetWidth)) + "px";
    tip.style.top = AXIS + (found.i + 1) * ROW + 4 + "px";
  }
  function find(px, py) {
    const i = Math.floor((py - AXIS) / ROW);
    if (i < 0 || i >= N || px < LEFT) return null;
    let best = null,
      gap = 4;
    for (let k = D.ranks[i].from; k < D.ranks[i].to; k++) {
      const x0 = x(S.begin[k]),
        x1 = Math.max(x(S.begin[k] + S.last[k]), x0 + 1.2);
      const far = px < x0 ? x0 - px : px > x1 ? px - x1 : 0;
      if (far < gap || (far === 0 && best)) {
        gap = Math.min(far, gap);
        best = { k, i, rank: D.ranks[i].rank };
      }
    }
    return best;
  }
  const inside = event => {
    const r = area.getBoundingClientRect();
    return [event.clientX - r.left, event.clientY - r.top];
  };
  area.addEventListener("pointerdown", event => {
    if (event.button) return;
    drag = { x: event.clientX, from, to, moved: false };
    area.setPointerCapture(event.pointerId);
  });
  area.addEventListener("pointermove", event => {
    if (!drag) return select(find(...inside(event)), inside(event)[0]);
    const moved = drag.x - event.clientX;
    if (Math.abs(moved) < 3 && !drag.moved) return;
    drag.moved = true;
    area.classList.add("moving");
    const by = (moved / (width() - LEFT)) * (drag.to - drag.from);
    [from, to] = [drag.from + by, drag.to + by];
    clamp();
    select(null);
    draw();
  });
  const drop = event => {
    if (drag && !drag.moved && event.type === "pointerup") select(find(...inside(event)), inside(event)[0]);
    drag = null;
    area.classList.remove("moving");
  };
  area.addEventListener("pointerup", drop);
  area.addEventListener("pointercancel", drop);
  area.addEventListener("pointerleave", event => {
    if (event.pointerType === "mouse" && !drag) select(null);
  });
  area.addEventListener("blur", () => select(null));
  area.addEventListener(
    "wheel",
    event => {
      const across = event.shiftKey ? event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        zoom(
          Math.exp(Math.sign(event.deltaY) * 0.2),
          Math.min(Math.max((inside(event)[0] - LEFT) / (width() - LEFT), 0), 1),
        );
      } else if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        const by = (across / (width() - LEFT)) * (to - from);
        [from, to] = [from + by, to + by];
        clamp();
        draw();
      } else return;
      event.preventDefault();
    },
    { passive: false },
  );
  // The operation of a row that is nearest to a time.
  function nearest(i, time) {
    let best = null;
    for (let k = D.ranks[i].from; k < D.ranks[i].to; k++)
      if (best === null || Math.abs(S.begin[k] - time) <= Math.abs(S.begin[best] - time)) best = k;
    return best;
  }
  function step(by, down) {
    let i = selected
        ? selected.i
        : Math.max(
            0,
            D.ranks.findIndex(r => r.tone === "bad" && r.to > r.from),
          ),
      k = null;
    if (!selected) k = nearest(i, fault ? fault[0] + ((fault[1] - fault[0]) * 2) / 3 : to);
    else if (down) {
      for (i += down; i >= 0 && i < N && k === null; i += k === null ? down : 0)
        k = nearest(i, S.begin[selected.k]);
    } else {
      const { from: a, to: b } = D.ranks[i];
      k = Math.min(Math.max(selected.k + by, a), b - 1);
    }
    if (k === null || i < 0 || i >= N) return;
    const begin = S.begin[k],
      size = to - from;
    if (begin < from + size * 0.05 || begin > to - size * 0.05) {
      [from, to] = [begin - size / 2, begin + size / 2];
      clamp();
      draw();
    }
    select({ k, i, rank: D.ranks[i].rank }, Math.max(x(begin), LEFT));
  }
  area.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowLeft: () => step(-1),
      ArrowRight: () => step(1),
      ArrowUp: () => step(0, -1),
      ArrowDown: () => step(0, 1),
      "+": () => zoom(0.7),
      "=": () => zoom(0.7),
      "-": () => zoom(1.4),
      0: () => show([0, whole]),
      Escape: () => select(null),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  });
  new ResizeObserver(() => draw()).observe(area);
  show(fault || [0, whole]);
})();
