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
for (const chart of document.querySelectorAll("svg.chart")) {
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
      page.showTipAt(hit.dataset.tip, hit.querySelector(".cursor, .cell, .bar, .mark") || hit);
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
