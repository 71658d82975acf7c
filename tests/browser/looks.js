// Looks at what is visible below an element and returns sentences on what is clipped, overlapping
// or has too little contrast (WCAG 2.2: SC 1.4.3 for texts, SC 1.4.11 for graphics).
(root) => {
  const shown = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const told = (e, text) => `<${e.tagName.toLowerCase()} class="${e.getAttribute("class") || ""}"> ${JSON.stringify(text.trim().slice(0, 60))}`;
  const all = [...root.querySelectorAll("*")].filter(shown);
  // A label for screen readers alone: its checkbox is no wider than its box.
  const unseen = (e) => (e.closest(".widget-checkbox")?.clientWidth ?? 99) < 30;
  const texts = all.filter((e) => !unseen(e)).flatMap((e) => [...e.childNodes]
    .filter((n) => n.nodeType === 3 && n.textContent.trim())
    .map((n) => ({ e, text: n.textContent, rects: rectsOf(n) })));
  const controls = all.filter((e) => e.matches("button, input, select, textarea"));

  function rectsOf(node) {
    const range = document.createRange();
    range.selectNodeContents(node);
    return [...range.getClientRects()].filter((r) => r.width > 1 && r.height > 1);
  }

  // --- clipped ---

  const hides = (style) => /hidden|clip/.test(style);

  // What of a text lies outside of an element that hides it; the page's own scrolling hides nothing.
  function clippedBy({ e, rects }) {
    for (let a = e; a && a !== root.parentElement; a = a.parentElement) {
      const s = getComputedStyle(a), box = a.getBoundingClientRect();
      if (a.tagName === "svg") {
        if (rects.some((r) => r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 2 || r.bottom > box.bottom + 2)) return a;
        continue;
      }
      if (s.display === "inline") continue;
      // Shortened on purpose: it ends with dots, and a pointer shows all.
      if (s.textOverflow === "ellipsis" && a.closest("[title]")) return null;
      if (hides(s.overflowX) && rects.some((r) => r.right > box.right + 1 || r.left < box.left - 1)) return a;
      if (hides(s.overflowY) && rects.some((r) => r.bottom > box.bottom + 2 || r.top < box.top - 2)) return a;
    }
    return null;
  }

  function width(text, e) {
    const pen = (width.pen ||= document.createElement("canvas").getContext("2d"));
    pen.font = getComputedStyle(e).font;
    return pen.measureText(text).width;
  }

  function clipped() {
    const found = texts.filter(clippedBy).map((t) => `clipped: ${told(t.e, t.text)}`);
    for (const e of controls) {
      const text = e.tagName === "SELECT" ? e.selectedOptions[0]?.text || "" : e.value ? "" : e.placeholder || "";
      const s = getComputedStyle(e);
      const room = e.clientWidth - parseFloat(s.paddingLeft) - parseFloat(s.paddingRight);
      if (e.tagName === "SELECT" && room >= 100) continue; // its list shows the whole text
      if (e.tagName !== "TEXTAREA" && width(text, e) > room + 1) found.push(`clipped: ${told(e, text)}`);
    }
    const page = root.getBoundingClientRect();
    const scrolls = (a) => a && a !== root && (/auto|scroll/.test(getComputedStyle(a).overflowX) && a.scrollWidth > a.clientWidth || scrolls(a.parentElement));
    for (const e of controls) {
      if (scrolls(e.parentElement)) continue; // a wide table is scrolled inside of the panel
      const r = e.getBoundingClientRect();
      if (r.right > page.right + 1) found.push(`outside of the panel: ${told(e, e.textContent)}`);
    }
    return found;
  }

  // --- overlapping ---

  const cut = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;

  function overlapping() {
    const whole = texts.filter(({ e }) => getComputedStyle(e).textOverflow !== "ellipsis");
    const boxes = whole.flatMap(({ e, text, rects }) => rects.map((r) => ({ e, text, r })));
    for (const e of controls) boxes.push({ e, text: e.value || e.textContent, r: e.getBoundingClientRect() });
    const found = [];
    boxes.forEach((a, at) => boxes.slice(at + 1).forEach((b) => {
      if (a.e.contains(b.e) || b.e.contains(a.e) || !cut(a.r, b.r)) return;
      found.push(`overlapping: ${told(a.e, a.text)} and ${told(b.e, b.text)}`);
    }));
    return found;
  }

  // --- contrast ---

  function rgba(text) {
    const pen = (rgba.pen ||= document.createElement("canvas").getContext("2d", { willReadFrequently: true }));
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  }
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const channel = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  function ratio(a, b) {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  }

  function behind(e) {
    const layers = [];
    for (let a = e; a; a = a.parentElement) {
      const colour = rgba(getComputedStyle(a).backgroundColor);
      layers.unshift(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  }

  // A label in a bar of a picture stands on the bar.
  function ground(e) {
    const at = e.getBoundingClientRect(), x = (at.left + at.right) / 2;
    const around = (r) => r.left < x && x < r.right && r.top < at.bottom && at.top < r.bottom;
    const bars = [...(e.closest("svg")?.querySelectorAll("rect") ?? [])];
    const bar = bars.find((rect) => around(rect.getBoundingClientRect()));
    return bar ? over(rgba(getComputedStyle(bar).fill), behind(e)) : behind(e);
  }

  // A group's opacity mixes what is in it with what is behind it.
  function faded(colour, e) {
    let share = colour[3];
    for (let a = e; a && a !== root; a = a.parentElement) share *= parseFloat(getComputedStyle(a).opacity);
    return [...colour.slice(0, 3), share];
  }

  function tooFaint(e, text, colour, ground, least) {
    const seen = ratio(over(faded(rgba(colour), e), ground), ground);
    return seen < least - 0.005 ? [`contrast ${seen.toFixed(2)} < ${least}: ${told(e, text)}`] : [];
  }

  function faint() {
    const found = [];
    for (const { e, text } of texts) {
      if (e.closest(":disabled, option")) continue;
      const s = getComputedStyle(e), size = parseFloat(s.fontSize);
      const large = size >= 24 || (size >= 18.66 && parseInt(s.fontWeight) >= 700);
      const least = large || e.closest("[aria-hidden=true]") ? 3 : 4.5;
      found.push(...tooFaint(e, text, e.closest("svg") ? s.fill : s.color, ground(e), least));
    }
    for (const e of controls.filter((one) => !one.disabled && one.tagName !== "BUTTON")) {
      if (e.type === "checkbox") continue; // drawn by the browser
      const s = getComputedStyle(e, e.value ? null : "::placeholder");
      found.push(...tooFaint(e, e.value || e.placeholder || "", s.color, behind(e), 4.5));
      const border = getComputedStyle(e).borderBottomColor;
      if (ratio(rgba(border), behind(e.parentElement)) < 3) found.push(`contrast of the border: ${told(e, "")}`);
    }
    for (const e of all.filter((one) => one.matches("polyline, circle, path") && one.closest("svg[role=img]"))) {
      const s = getComputedStyle(e), colour = s.stroke !== "none" ? s.stroke : s.fill;
      found.push(...tooFaint(e, "", colour, behind(e), 3));
    }
    for (const e of all.filter((one) => one.matches("[role=progressbar] > div")))
      found.push(...tooFaint(e, "bar", getComputedStyle(e).backgroundColor, behind(e.parentElement), 3));
    return found;
  }

  return [...new Set([...clipped(), ...overlapping(), ...faint()])];
}
