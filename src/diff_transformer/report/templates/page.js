"use strict";

const page = {
  tip: document.getElementById("tip"),
  spoken: document.getElementById("spoken"),

  /* Show words beside a point of the window, inside its edges. */
  showTip(words, x, y) {
    page.tip.textContent = words;
    page.tip.hidden = false;
    const { width, height } = page.tip.getBoundingClientRect();
    const left = Math.min(Math.max(x - width / 2, 8), innerWidth - width - 8);
    const top = y - height - 14 < 8 ? y + 20 : y - height - 14;
    page.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  },

  hideTip() {
    page.tip.hidden = true;
  },

  say(words) {
    page.spoken.textContent = words;
  },
};

/* Marks of charts show what they stand for. */
for (const kind of ["pointerover", "pointerdown"])
  addEventListener(kind, (event) => {
    const mark = event.target.closest?.("svg [aria-label]");
    if (mark) page.showTip(mark.getAttribute("aria-label"), event.clientX, event.clientY);
    else if (!event.target.closest?.("#explorer-view")) page.hideTip();
  });

/* On paper, every disclosure is open. */
addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((details) => (details.open = true));
});
