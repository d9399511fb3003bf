"use strict";

/* Tables as CSV files, made when they are asked for. */
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
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob(["\ufeff", download.csv(tables())], { type: "text/csv;charset=utf-8" }));
      link.download = `${name}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    return button;
  },
};

for (const figure of document.querySelectorAll("section.figure")) {
  const folded = figure.querySelector(":scope > details.data-of");
  const within = folded || figure.querySelector(":scope > .body");
  const tables = within ? [...within.querySelectorAll("table.data")] : [];
  if (!tables.length) continue;
  const button = download.button(figure.id, () => tables.map(download.rows));
  if (folded) folded.querySelector("summary").after(button);
  else within.append(button);
}
