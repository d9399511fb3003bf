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

/* The explorer: choose a text, a model, a layer and head, and the token that attends. Everything is drawn from `state`. */
{
  const view = document.getElementById("explorer-view");
  startExplorer(view, JSON.parse(document.getElementById("explorer-data").textContent).examples);
}

function startExplorer(view, examples) {
  const state = { example: 0, model: 0, layer: 0, head: 0, query: 0, shown: 2, scaled: true };
  let kept = null; // The chosen token, while the pointer shows another.

  const make = (name, options = {}, ...children) => {
    const { data, ...rest } = options;
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(rest)) {
      if (key in element && !key.startsWith("aria") && key !== "role") element[key] = value;
      else element.setAttribute(key, value);
    }
    Object.assign(element.dataset, data);
    element.append(...children);
    return element;
  };
  const example = () => examples[state.example];
  const model = () => example().models[state.model];
  const tokens = () => example().tokens;
  const clamp = (value, high) => Math.min(Math.max(value, 0), high);
  const percent = (value) => `${value < 0 ? "−" : ""}${(100 * Math.abs(value)).toFixed(1)} %`;
  const named = (text) => `“${text.trim() || text.replaceAll("\n", "↵").replaceAll(" ", "␣")}”`;

  /* ---- the parts of the view */
  const controls = make("div", { className: "ex-controls" });
  const heads = make("div", { className: "ex-heads", role: "radiogroup", "aria-label": "Layer and head" });
  const headCaption = make("p", { className: "small" });
  const maps = make("div", { className: "ex-maps" });
  const mapCaption = make(
    "p",
    { className: "small" },
    "Rows are the tokens that attend, columns the tokens attended to; " +
      "a band is the answer. Move over the rows to see another token's attention; a click keeps it.",
  );
  const status = make("p", { className: "ex-status" });
  const panes = make("div", { className: "ex-panes" });
  const tabs = make("div", { className: "ex-tabs" });
  const drawing = make(
    "div",
    {},
    controls,
    make("div", { className: "ex-top" }, make("div", {}, headCaption, heads), make("div", { className: "ex-plots" }, maps, mapCaption)),
    status,
    tabs,
    panes,
  );
  view.replaceChildren(drawing);

  const mapNames = () => (model().second ? ["A₁", state.scaled ? "λ A₂" : "A₂", "A₁ − λ A₂"] : ["A"]);
  const mapNotes = () => (model().second ? ["first map", state.scaled ? "subtracted" : "second map", "what DIFF uses"] : ["softmax attention"]);
  const which = (place) => (model().second ? (place === 1 && !state.scaled ? 3 : place) : 0);
  const weightAt = (place, query, key) => attention.weight(which(place), model(), state.layer, state.head, query, key);

  /* A row of buttons of which one is chosen; the arrow keys move the choice. */
  function segments(label, names, chosen, choose) {
    const move = (i) => {
      choose(i);
      view.querySelector(`[role=radiogroup][aria-label="${label}"] [aria-checked=true]`).focus({ preventScroll: true });
    };
    const row = make("div", { className: "segments", role: "radiogroup", "aria-label": label });
    names.forEach((name, i) => {
      const button = make("button", { type: "button", role: "radio", tabIndex: i === chosen ? 0 : -1 }, name);
      button.setAttribute("aria-checked", i === chosen);
      button.addEventListener("click", () => move(i));
      row.append(button);
    });
    row.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      move((chosen + step + names.length) % names.length);
    });
    return row;
  }

  function drawControls() {
    const names = example().models.map((m) => m.name);
    const parts = [
      segments("Model", names, state.model, (i) => {
        state.model = i;
        Object.assign(state, attention.bestHead(model(), state.query));
        drawAll();
      }),
    ];
    if (examples.length > 1) {
      const select = make("select", {}, ...examples.map((e, i) => make("option", { value: i, selected: i === state.example }, e.title)));
      select.addEventListener("change", () => {
        openExample(Number(select.value));
        view.querySelector("select")?.focus();
      });
      parts.unshift(make("label", {}, "Text", select));
    } else parts.unshift(make("span", { className: "small" }, example().title));
    if (model().second) {
      parts.push(segments("Second map", ["λ A₂", "A₂"], state.scaled ? 0 : 1, (i) => {
        state.scaled = i === 0;
        drawAll();
      }));
    }
    const { answer, generated } = model();
    const said = [answer && `expected ${named(answer)}`, generated && `this model wrote ${named(generated)}`].filter(Boolean);
    if (said.length) parts.push(make("span", { className: "small" }, said.join(", ")));
    controls.replaceChildren(...parts);
  }

  function drawHeads() {
    const of = model();
    headCaption.textContent =
      "Layer (row) and head (column); the tint and number are the share, in %, of the chosen token's attention that falls on the answer";
    heads.style.setProperty("--row", `${Math.max(24, Math.min(36, Math.round(288 / of.layers)))}px`);
    heads.style.gridTemplateColumns = `auto repeat(${of.heads}, minmax(0, 40px))`;
    const cells = [make("span")];
    for (let head = 0; head < of.heads; head++) cells.push(make("span", {}, String(head + 1)));
    for (let layer = 0; layer < of.layers; layer++) {
      cells.push(make("span", { className: "row" }, String(layer + 1)));
      for (let head = 0; head < of.heads; head++) {
        const share = attention.answerShare(of, layer, head, state.query);
        const chosen = layer === state.layer && head === state.head;
        const button = make("button", { type: "button", role: "radio", tabIndex: chosen ? 0 : -1, data: { layer, head } });
        if (of.heads <= 12) button.textContent = (100 * share).toFixed(0).replace("-0", "0").replace("-", "−");
        button.setAttribute("aria-checked", chosen);
        button.setAttribute("aria-label", `layer ${layer + 1}, head ${head + 1}, ${percent(share)} on the answer`);
        button.style.background = tint.of(share).css;
        button.style.color = tint.of(share).text;
        cells.push(button);
      }
    }
    heads.replaceChildren(...cells);
  }

  heads.addEventListener("click", (event) => {
    const at = event.target.closest("button")?.dataset;
    if (at) chooseHead(Number(at.layer), Number(at.head));
  });
  heads.addEventListener("pointermove", (event) => {
    const words = event.target.closest("button")?.getAttribute("aria-label");
    if (words) page.showTip(words.replace(", head", "\u00a0head").replace(", ", "\n"), event.clientX, event.clientY);
    else page.hideTip();
  });
  heads.addEventListener("pointerleave", page.hideTip);
  heads.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    chooseHead(clamp(state.layer + move[0], model().layers - 1), clamp(state.head + move[1], model().heads - 1));
  });
  function chooseHead(layer, head) {
    Object.assign(state, { layer, head });
    drawAll();
    heads.querySelector("[aria-checked=true]").focus({ preventScroll: true });
  }

  /* ---- maps of all tokens by all tokens */
  function drawMaps() {
    const names = mapNames();
    const size = tokens().length;
    maps.classList.toggle("single", names.length === 1);
    maps.replaceChildren(
      ...names.map((name, place) => {
        const canvas = make("canvas", { width: size, height: size });
        const pixels = new ImageData(size, size);
        for (let q = 0; q < size; q++)
          for (let k = 0; k <= q; k++) {
            const { fill } = tint.of(weightAt(place, q, k));
            pixels.data.set([...fill, 255], 4 * (q * size + k));
          }
        canvas.getContext("2d").putImageData(pixels, 0, 0);
        const plot = make("div", { className: "ex-plot", role: "img" }, canvas);
        plot.setAttribute("aria-label", `${name} of layer ${state.layer + 1}, head ${state.head + 1}: query tokens down, key tokens across`);
        const { span } = model();
        const band = make("div", { className: "at-span" });
        Object.assign(band.style, { left: `${(100 * span[0]) / size}%`, width: `${(100 * (span[1] - span[0])) / size}%` });
        plot.append(band);
        const row = make("div", { className: "at-row" });
        row.style.height = `${100 / size}%`;
        plot.append(row);
        const spot = (event) => {
          const box = plot.getBoundingClientRect();
          const cell = (at, start, length) => clamp(Math.floor(((at - start) / length) * size), size - 1);
          return [cell(event.clientY, box.top, box.height), cell(event.clientX, box.left, box.width)];
        };
        plot.addEventListener("pointermove", (event) => {
          const [q, k] = spot(event);
          const read = k > q ? "later than the query: not attended" : percent(weightAt(place, q, k));
          if (event.pointerType === "mouse") preview(q);
          page.showTip(`${name}: ${read}\nfrom ${named(tokens()[q])} to ${named(tokens()[k])}`, event.clientX, event.clientY);
        });
        plot.addEventListener("pointerleave", () => {
          page.hideTip();
          if (kept !== null) preview(kept);
          kept = null;
        });
        plot.addEventListener("click", (event) => chooseQuery(spot(event)[0]));
        return make("div", { className: "ex-map" }, make("h3", {}, name, " ", make("small", {}, mapNotes()[place])), plot);
      }),
    );
  }

  /* ---- the text, tinted */
  function drawPanes() {
    const names = mapNames();
    state.shown = Math.min(state.shown, names.length - 1);
    const three = names.length > 1;
    const { span } = model();
    panes.classList.toggle("three", three);
    tabs.hidden = !three;
    tabs.replaceChildren(
      ...(three
        ? [segments("Map shown in the text", names, state.shown, (i) => {
            state.shown = i;
            drawPanes();
            drawQuery();
          })]
        : []),
    );
    panes.replaceChildren(
      ...names.map((name, place) => {
        const list = make("div", { className: "ex-tokens", role: "listbox", tabIndex: 0, id: `ex-list-${place}` });
        list.setAttribute("aria-label", `Text tinted by ${name}; the arrow keys choose the token that attends`);
        tokens().forEach((token, i) => {
          const lead = /^ (?=\S)/.test(token) ? 1 : 0; // The space before a word is not tinted, nor kept where a line starts.
          const space = lead && i && !tokens()[i - 1].endsWith("\n") ? " " : "";
          const word = token.slice(lead).replaceAll("\n", "↵\n") || "∅";
          const [before, text] = i > span[0] && i < span[1] ? ["", space + word] : [space, word]; // One outline.
          list.append(before, make("span", { role: "option", id: `ex-${place}-${i}`, data: { at: i } }, text));
        });
        list.addEventListener("click", (event) => event.target.dataset.at && chooseQuery(Number(event.target.dataset.at)));
        list.addEventListener("pointermove", (event) => {
          const at = event.target.dataset.at;
          if (at === undefined) return page.hideTip();
          page.showTip(reading(Number(at)), event.clientX, event.clientY);
        });
        list.addEventListener("pointerleave", page.hideTip);
        list.addEventListener("keydown", (event) => {
          const last = tokens().length - 1;
          const moves = { ArrowRight: state.query + 1, ArrowDown: state.query + 10, ArrowLeft: state.query - 1, ArrowUp: state.query - 10 };
          const to = { ...moves, Home: 0, End: last }[event.key];
          if (to === undefined) return;
          event.preventDefault();
          chooseQuery(clamp(to, last), true);
        });
        const title = make("h3", {}, name, " ", make("small", {}, mapNotes()[place]));
        return make("div", { className: `ex-pane${place === state.shown ? " current" : ""}` }, title, list);
      }),
    );
  }

  function reading(key) {
    const token = named(tokens()[key]);
    if (key > state.query) return `${token}\nlater than the chosen token: not attended`;
    const values = mapNames().map((name, place) => `${name}: ${percent(weightAt(place, state.query, key))}`);
    return [token, ...values].join("\n");
  }

  /* Show another token's attention without choosing it. */
  function preview(query) {
    if (query === state.query) return;
    kept ??= state.query;
    state.query = query;
    drawQuery();
  }

  function chooseQuery(query, speak = false) {
    kept = null;
    state.query = query;
    page.hideTip();
    drawHeads();
    drawQuery();
    if (speak) page.say(status.textContent);
  }

  function drawQuery() {
    const of = model();
    const size = tokens().length;
    for (const row of maps.querySelectorAll(".at-row")) row.style.top = `${(100 * state.query) / size}%`;
    [...panes.querySelectorAll(".ex-tokens")].forEach((list, place) => {
      [...list.children].forEach((span, key) => {
        const later = key > state.query;
        const shade = later ? null : tint.of(weightAt(place, state.query, key));
        const inside = key >= of.span[0] && key < of.span[1];
        span.className = [later && "later", key === state.query && "query", inside && "answer"].filter(Boolean).join(" ");
        span.style.background = shade ? shade.css : "";
        span.style.color = shade ? shade.text : "";
        span.setAttribute("aria-selected", key === state.query);
      });
      list.setAttribute("aria-activedescendant", `ex-${place}-${state.query}`);
    });
    const rows = [...Array(state.query + 1).keys()]
      .map((key) => [key, ...mapNames().map((_, place) => weightAt(place, state.query, key))])
      .sort((a, b) => Math.abs(b.at(-1)) - Math.abs(a.at(-1)))
      .slice(0, 5);
    const share = percent(attention.answerShare(of, state.layer, state.head, state.query));
    const lambda = of.second ? ` (λ = ${of.lambda[state.layer].toFixed(2)})` : "";
    status.textContent =
      `${of.name}, layer ${state.layer + 1}, head ${state.head + 1}${lambda}: attention from token ${state.query + 1} of ${size}, ` +
      `${named(tokens()[state.query])}, ${share} of it on the answer. Strongest: ${named(tokens()[rows[0][0]])}, ${percent(rows[0].at(-1))}.`;
  }

  function drawAll() {
    drawControls();
    drawHeads();
    drawMaps();
    drawPanes();
    drawQuery();
  }

  function repaint() {
    tint.readTheme(view);
    drawAll();
  }

  function openExample(place) {
    Object.assign(state, { example: place, model: 0, shown: 2, query: examples[place].tokens.length - 1 });
    Object.assign(state, attention.bestHead(model(), state.query));
    drawAll();
  }

  examples.forEach(({ tokens, models }) => models.forEach((model) => (model.size = tokens.length)));
  tint.readTheme(view);
  openExample(0);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}
