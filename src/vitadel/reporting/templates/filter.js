// Filters by family, threat and words, and a list to sort by for screens where headings are not shown.
const controls = document.querySelector("form.filters");
if (controls) {
  controls.hidden = false;
  const rows = [...document.querySelectorAll("section.board tbody tr")];
  const count = controls.querySelector("output");
  const apply = () => {
    const { family, threat, words } = controls.elements;
    const wanted = words.value.trim().toLowerCase();
    for (const row of rows) {
      const fits = (choice, value) => choice === "" || choice === value;
      const shown = fits(family.value, row.dataset.family) && fits(threat.value, row.dataset.threat) &&
        row.cells[0].textContent.toLowerCase().includes(wanted);
      row.hidden = !shown;
    }
    for (const board of document.querySelectorAll("section.board")) {
      board.hidden = !board.querySelector("tbody tr:not([hidden])");
    }
    const left = rows.filter((row) => !row.hidden).length;
    count.textContent = left === rows.length ? `${left} runs` : `${left} of ${rows.length} runs`;
  };
  controls.addEventListener("input", apply);
  controls.addEventListener("submit", (event) => event.preventDefault());
  const order = controls.elements.order;
  const names = new Set([...document.querySelectorAll("section.board thead th")].map((heading) => heading.dataset.name));
  for (const name of names) order.append(new Option(name, name));
  order.value = "Rank";  // as the rows stand in the file
  order.addEventListener("change", () => {
    for (const heading of document.querySelectorAll("section.board thead th")) {
      if (heading.dataset.name === order.value) heading.querySelector("button")?.click();
    }
  });
  apply();
}
