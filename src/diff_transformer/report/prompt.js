"use strict";

/* The box for a text of one's own. Only the server of `report --serve` can draw it, so a page from a file has none. */
function promptForm(prompt, make, drawn) {
  const seeds = [...new Set(prompt.models.map((model) => model.seed))];
  const text = make("textarea", { id: "ex-text", rows: 4, maxLength: prompt.bytes, spellcheck: false });
  const button = make("button", { type: "submit" }, "Draw its attention");
  const said = make("p", { className: "ex-said", role: "status", "aria-live": "polite", id: "ex-said" });
  const hint = make("span", { className: "ex-caption", id: "ex-hint" }, `At most ${prompt.tokens} tokens; Ctrl + Enter draws. The text stays on this machine.`);
  const select = make("select", { id: "ex-seed" }, ...seeds.map((seed) => make("option", { value: seed }, `seed ${seed}`)));
  const choice = seeds.length > 1 ? [make("label", {}, "Models of", select)] : [];
  text.setAttribute("aria-describedby", "ex-hint ex-said");
  const form = make(
    "form",
    { className: "ex-prompt" },
    make("label", { htmlFor: "ex-text" }, "A text of your own"),
    text,
    make("div", { className: "ex-controls" }, button, ...choice, hint),
    said,
  );

  async function ask(model) {
    const body = JSON.stringify({ model, text: text.value });
    const response = await fetch("/attention", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  }

  /* Models with the same tokens stand side by side in one example. */
  async function draw() {
    const seed = Number(select.value);
    const found = [];
    for (const { name } of prompt.models.filter((model) => model.seed === seed)) {
      said.textContent = `${name} reads the text …`;
      const example = await ask(name);
      const same = found.find((other) => JSON.stringify(other.tokens) === JSON.stringify(example.tokens));
      if (same) same.models.push(...example.models);
      else found.push(example);
    }
    drawn(found);
    said.textContent = `Drawn below: ${found[0].tokens.length} tokens, ${found.flatMap((example) => example.models).length} models.`;
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    button.disabled = true;
    said.classList.remove("refused");
    try {
      await draw();
    } catch (error) {
      said.classList.add("refused");
      said.textContent = error instanceof TypeError ? "The server does not answer; is `report --serve` still running?" : `Not drawn: ${error.message}`;
    }
    button.disabled = false;
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return form;
}
