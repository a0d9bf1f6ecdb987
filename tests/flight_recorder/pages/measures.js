// What tests measure in a page. Each function is called by an expression of the test.
window.measures = (() => {
  const visible = element => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const rgb = text =>
    text
      .match(/[\d.]+/g)
      .slice(0, 3)
      .map(Number);
  const opacity = element => {
    let all = 1;
    for (let at = element; at; at = at.parentElement) all *= +getComputedStyle(at).opacity;
    return all;
  };
  // The part of a rectangle that the element's scrolling ancestors and the drawing around it show.
  function shown(rect, element) {
    let { left, top, right, bottom } = rect;
    for (let at = element; at && at !== document.body; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.overflowX === "visible" && style.overflowY === "visible") continue;
      const box = at.getBoundingClientRect();
      [left, top, right, bottom] = [
        Math.max(left, box.left),
        Math.max(top, box.top),
        Math.min(right, box.right),
        Math.min(bottom, box.bottom),
      ];
    }
    return { left, top, right, bottom };
  }

  function texts() {
    const found = [],
      walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode,
        parent = node.parentElement;
      if (
        !node.textContent.trim() ||
        parent.closest("script, style, noscript, svg title") ||
        !visible(parent)
      )
        continue;
      const style = getComputedStyle(parent),
        svg = parent.namespaceURI.endsWith("svg");
      const range = document.createRange();
      range.selectNodeContents(node);
      const size = parseFloat(style.fontSize),
        bold = +style.fontWeight >= 700;
      for (const whole of range.getClientRects()) {
        const r = shown(whole, parent);
        if (r.right - r.left < 2 || r.bottom - r.top < 4) continue;
        found.push({
          text: node.textContent.trim().slice(0, 60),
          colour: rgb(svg ? style.fill : style.color),
          opacity: opacity(parent),
          least: size >= 24 || (bold && size >= 18.66) ? 3 : 4.5,
          x: r.left + scrollX,
          y: r.top + scrollY,
          width: r.right - r.left,
          height: r.bottom - r.top,
        });
      }
    }
    return found;
  }
  function hideTexts() {
    const style = document.createElement("style");
    style.textContent = "* { color: transparent !important } svg text { fill: transparent !important }";
    document.head.append(style);
  }

  // The lowest contrast of each text to the pixels behind it, in a picture of the page without its texts.
  const light = ([r, g, b]) => {
    const linear = c => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  async function contrasts(picture, found) {
    const image = new Image();
    image.src = picture;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    return found.map(one => {
      // The letters' part of the line: a fifth of its height above and below is empty.
      const x = Math.ceil(one.x),
        y = Math.ceil(one.y + one.height * 0.2);
      const width = Math.max(1, Math.floor(one.x + one.width) - x),
        height = Math.max(1, Math.floor(one.y + one.height * 0.8) - y);
      const { data } = context.getImageData(x, y, width, height);
      let worst = Infinity;
      for (let i = 0; i < data.length; i += 4) {
        const behind = [data[i], data[i + 1], data[i + 2]];
        const seen = one.colour.map((c, n) => c * one.opacity + behind[n] * (1 - one.opacity));
        worst = Math.min(worst, contrast(seen, behind));
      }
      return { ...one, contrast: Math.round(worst * 100) / 100 };
    });
  }

  // Elements that reach beyond the window, but for those in a part that scrolls or clips by itself.
  function beyond() {
    return [...document.body.querySelectorAll("*")]
      .filter(visible)
      .filter(element => shown(element.getBoundingClientRect(), element).right > innerWidth + 0.5)
      .map(element => element.outerHTML.slice(0, 120));
  }
  const controls = () =>
    [...document.querySelectorAll("button, summary, a, input, select, [tabindex='0']")].filter(visible);
  const enabled = () => controls().filter(control => !control.disabled);

  // The keys of what the timeline draws, and of its legend.
  function drawn() {
    const keys = new Set();
    for (const part of document.querySelectorAll("svg.rows :is(path, rect, circle)")) {
      if (part.closest("defs")) continue;
      const style = new Set(part.classList);
      for (const key of style) if (/^op\d$|^(pale|marked|absent|since)$/.test(key)) keys.add(key);
      if (style.has("open")) keys.add(style.has("bad") ? "bad" : "warn");
      if (style.has("sign")) keys.add(style.has("bad") ? "culprit" : "victim");
    }
    return [...keys].sort();
  }
  const legend = () =>
    [...document.querySelectorAll("#timeline .legend li")].map(item => item.dataset.key).sort();
  // Pairs of the parts that a card's bars have, and of those in its legend.
  function bars() {
    const parts = (card, where) =>
      [...new Set([...card.querySelectorAll(where)].map(part => part.className))].sort();
    return [...document.querySelectorAll(".card:has(.bar)")].map(card => [
      parts(card, ".bar > i"),
      parts(card, ".legend i"),
    ]);
  }
  return { texts, hideTexts, contrasts, beyond, controls, enabled, drawn, legend, bars };
})();
