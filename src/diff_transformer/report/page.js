"use strict";

const page = {
  tip: document.getElementById("tip"),
  spoken: document.getElementById("spoken"),

  anchor: null,

  /* Show words beside a point of the window, inside its edges. */
  showTip(words, x, y) {
    const box = page.tip;
    page.anchor = null;
    box.textContent = words;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(Math.max(x - width / 2, 8), innerWidth - width - 8);
    const top = y - height - 14 < 8 ? y + 20 : y - height - 14;
    box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  },

  /* Show words above an element, and keep them there while the page scrolls. */
  showTipAt(words, element) {
    const box = element.getBoundingClientRect();
    page.showTip(words, box.left + box.width / 2, box.top);
    page.anchor = element;
  },

  hideTip() {
    page.tip.hidden = true;
    page.anchor = null;
  },

  say(words) {
    page.spoken.textContent = words;
  },

  /* Called after every change of theme; the explorer repaints its canvases. */
  onTheme: [],
};

{
  const order = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = "auto";
  try {
    theme = localStorage.getItem("diff-transformer-theme") || "auto";
  } catch {
    /* A browser may refuse storage to a local file. */
  }
  const apply = () => {
    if (!order.includes(theme)) theme = "auto";
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    page.onTheme.forEach((repaint) => repaint());
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    apply();
    try {
      localStorage.setItem("diff-transformer-theme", theme);
    } catch {
      /* The choice then lasts as long as the page. */
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

/* Charts: the pointer, a tap or the arrow keys choose one .hit, whose data-tip is shown and spoken. */
for (const chart of document.querySelectorAll(".chart")) {
  const hits = [...chart.querySelectorAll(".hit")];
  if (!hits.length) {
    chart.removeAttribute("tabindex");
    continue;
  }
  let current = -1;
  const choose = (index, x, y) => {
    hits[current]?.classList.remove("on");
    current = index;
    if (index < 0) return page.hideTip();
    const hit = hits[index];
    hit.classList.add("on");
    if (x === undefined) {
      page.showTipAt(hit.dataset.tip, hit);
      page.say(hit.dataset.tip);
    } else page.showTip(hit.dataset.tip, x, y);
  };
  const under = (event) => hits.indexOf(event.target.closest?.(".hit"));
  chart.addEventListener("pointermove", (event) => {
    const rests = event.movementX === 0 && event.movementY === 0; // The page scrolled below a pointer at rest.
    if (!rests) choose(under(event), event.clientX, event.clientY);
  });
  chart.addEventListener("pointerdown", (event) => choose(under(event), event.clientX, event.clientY));
  chart.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !page.anchor && choose(-1));
  chart.addEventListener("blur", () => choose(-1));
  chart.addEventListener("keydown", (event) => {
    const last = hits.length - 1;
    const moves = { ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1 };
    const to = { ...moves, Home: 0, End: last, Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(event.key === "Escape" ? -1 : Math.min(Math.max(to, 0), last));
  });
}
addEventListener("scroll", () => (page.anchor ? page.showTipAt(page.tip.textContent, page.anchor) : page.hideTip()), {
  passive: true,
});

/* On paper, every disclosure is open. */
{
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((details) => (details.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
}

/* Tables as CSV files and charts as SVG or PNG files, made when they are asked for. */
const download = {
  /* Text that a spreadsheet would compute with is marked as text; minus signs become those of numbers. */
  cell(words) {
    const plain = words.trim().replace(/\s*\n\s*/g, " ").replace(/^−(?=[\d.])/, "-");
    if (/^[+-]?\d{1,3}(,\d{3})+(\.\d+)?$/.test(plain)) return plain.replaceAll(",", "");
    const safe = /^[=+\-@\t]/.test(plain) && !/^[+-][\d.]/.test(plain) ? `'${plain}` : plain;
    return /[",\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  },

  rows(table) {
    return [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
  },

  csv(tables) {
    return tables.map((rows) => rows.map((row) => row.map((cell) => download.cell(String(cell))).join(",")).join("\r\n")).join("\r\n\r\n");
  },

  /* A button that saves what `tables()` gives: a list of lists of rows. */
  button(name, tables) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "save", textContent: "Save as CSV" });
    button.setAttribute("aria-label", `Save the data of ${name} as CSV`);
    button.addEventListener("click", () => {
      download.save(`${name}.csv`, new Blob(["\ufeff", download.csv(tables())], { type: "text/csv;charset=utf-8" }));
    });
    return button;
  },

  save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  },

  /* Any CSS colour as #rrggbbaa, which every program reads. */
  plain(colour) {
    if (colour === "none") return colour;
    const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    return `#${[...brush.getImageData(0, 0, 1, 1).data].map((v) => v.toString(16).padStart(2, "0")).join("")}`;
  },

  /* A chart as the text of an SVG file, with the colours and sizes that it has on the page now. */
  svg(chart) {
    const copy = chart.cloneNode(true);
    const shown = [...chart.querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((element, i) => {
      const style = getComputedStyle(shown[i]);
      for (const name of ["fill", "stroke"]) {
        if (element.hasAttribute(name)) element.setAttribute(name, download.plain(style[name]));
      }
      if (element.tagName === "text") element.setAttribute("font-size", style.fontSize);
    });
    copy.querySelectorAll(".hit").forEach((hit) => hit.remove());
    const { width, height } = chart.viewBox.baseVal;
    const ground = document.createElementNS(chart.namespaceURI, "rect");
    const colours = { width, height, fill: download.plain(getComputedStyle(document.body).backgroundColor) };
    Object.entries(colours).forEach(([name, value]) => ground.setAttribute(name, value));
    copy.prepend(ground);
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    return new XMLSerializer().serializeToString(copy);
  },

  /* The same as a PNG file of three times the size. */
  async png(chart) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(download.svg(chart))}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [3 * image.width, 3 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  },
};

for (const panel of document.querySelectorAll(".panel:has(> svg.chart)")) {
  const figure = panel.closest("section.figure");
  const title = panel.querySelector("h3").textContent;
  const chart = panel.querySelector("svg.chart");
  const name = [figure?.id || "chart", title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 40)].join("-");
  const files = {
    SVG: () => new Blob([download.svg(chart)], { type: "image/svg+xml" }),
    PNG: () => download.png(chart),
  };
  const row = document.createElement("p");
  row.className = "save-chart";
  for (const [kind, make] of Object.entries(files)) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: kind });
    button.setAttribute("aria-label", `Save “${title}” as ${kind}`);
    button.addEventListener("click", async () => download.save(`${name}.${kind.toLowerCase()}`, await make()));
    row.append(button);
  }
  panel.append(row);
}

for (const figure of document.querySelectorAll("section.figure")) {
  const folded = figure.querySelector("details.data-of");
  const within = folded || figure.querySelector(".body");
  const tables = within ? [...within.querySelectorAll("table.data")] : [];
  if (!tables.length) continue;
  const button = download.button(figure.id, () => tables.map(download.rows));
  if (folded) folded.querySelector("summary").after(button);
  else within.append(button);
}
