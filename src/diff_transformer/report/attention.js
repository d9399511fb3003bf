"use strict";

/* A packed map holds, for each layer and head, row q's weights on the keys 0..q; a byte b stands for (b / 255)^2. */
const attention = {
  bytes: new WeakMap(),

  unpack(model, part) {
    if (!model[part]) return null;
    if (!attention.bytes.has(model)) attention.bytes.set(model, {});
    const cache = attention.bytes.get(model);
    cache[part] ??= Uint8Array.from(atob(model[part]), (character) => character.charCodeAt(0));
    return cache[part];
  },

  /* Weight from query to key in map 0 (A1, or the Transformer's A), 1 (lambda A2), 2 (A1 - lambda A2) or 3 (A2). */
  weight(map, model, layer, head, query, key) {
    const triangle = (model.size * (model.size + 1)) / 2;
    const at = (layer * model.heads + head) * triangle + (query * (query + 1)) / 2 + key;
    const read = (part) => ((attention.unpack(model, part)?.[at] ?? 0) / 255) ** 2;
    if (map === 0) return read("first");
    if (map === 3) return read("second");
    const second = model.lambda[layer] * read("second");
    return map === 1 ? second : read("first") - second;
  },

  /* The share of a row's magnitudes that falls on the answer. */
  answerShare(model, layer, head, query) {
    let inside = 0;
    let all = 0;
    for (let key = 0; key <= query; key++) {
      const value = Math.abs(attention.weight(2, model, layer, head, query, key));
      all += value;
      if (key >= model.span[0] && key < model.span[1]) inside += value;
    }
    return all ? inside / all : 0;
  },

  /* The weight of a row that is furthest from zero. */
  largest(model, layer, head, query) {
    let most = 0;
    for (let key = 0; key <= query; key++) {
      const value = attention.weight(2, model, layer, head, query, key);
      if (Math.abs(value) > Math.abs(most)) most = value;
    }
    return most;
  },

  /* The layer and head that give the answer its largest share. */
  bestHead(model, query) {
    let best = { share: -1 };
    for (let layer = 0; layer < model.layers; layer++)
      for (let head = 0; head < model.heads; head++) {
        const share = attention.answerShare(model, layer, head, query);
        if (share > best.share) best = { share, layer, head };
      }
    return { layer: best.layer, head: best.head };
  },
};

/* One colour scale for all maps: the tint grows with the square root of |weight|; negative weights have their own hue. */
const tint = {
  steps: [],

  /* Read the page's colours, which follow its theme: 511 steps from -1 to 1, each with the text colour that stands out. */
  readTheme(within) {
    const probe = within.appendChild(document.createElement("span"));
    const rgb = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    };
    const [base, positive, negative, ink, paper] = ["--surface", "--positive", "--negative", "--ink", "--bg"].map(rgb);
    probe.remove();
    const luminance = (colour) => {
      const [r, g, b] = colour.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const contrast = (a, b) => Math.max(luminance(a), luminance(b)) / Math.min(luminance(a), luminance(b));
    tint.steps = Array.from({ length: 511 }, (_, i) => {
      const strength = Math.abs(i - 255) / 255;
      const end = i < 255 ? negative : positive;
      const fill = base.map((v, c) => Math.round(v + strength * (end[c] - v)));
      const text = contrast(ink, fill) >= contrast(paper, fill) ? ink : paper;
      return { fill, css: `rgb(${fill})`, text: `rgb(${text})` };
    });
  },

  of(value) {
    return tint.steps[255 + Math.round(Math.sign(value) * Math.sqrt(Math.min(Math.abs(value), 1)) * 255)];
  },
};
