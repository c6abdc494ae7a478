
"use strict";
// Headings become buttons that sort their table. Without this script the tables stand in the order of the report.
const valueOf = (cell) => (cell ? cell.dataset.sort ?? cell.textContent : "").trim();
const numberIn = (text) => /^[<>]?\s*([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)/i.exec(text.replace("−", "-"))?.[1].replaceAll(",", "");
for (const table of document.querySelectorAll("table:not(.plain)")) {
  const bodies = [...table.tBodies];
  // A table of several bodies keeps each together, as the rows in it belong to one thing.
  const whole = bodies.length > 1;
  const units = whole ? bodies : [...(bodies[0]?.rows ?? [])];
  const headings = [...(table.tHead?.rows[0]?.cells ?? [])];
  if (units.length < 2) continue;
  const sortBy = (heading, column) => {
    const texts = new Map(units.map((unit) => [unit, valueOf((whole ? unit.rows[0] : unit).cells[column])]));
    const filled = [...texts.values()].filter((text) => text !== "");
    const numeric = filled.length > 0 && filled.every((text) => numberIn(text) !== undefined);
    const before = heading.getAttribute("aria-sort");
    const rising = before ? before === "descending" : !numeric;
    for (const other of headings) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const compare = (one, other) => {
      const [a, b] = [texts.get(one), texts.get(other)];
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = numeric ? numberIn(a) - numberIn(b) : a.localeCompare(b, undefined, { numeric: true });
      return rising ? order : -order;
    };
    (whole ? table : bodies[0]).append(...[...units].sort(compare));
  };
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort by this column";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(heading, column));
    heading.append(button);
  });
}
