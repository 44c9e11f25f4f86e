// Filters above the table of features: words, and a choice for each of the columns category, level and numerics.
(function () {
  function filters(table) {
    const titles = Array.from(table.tHead.rows[0].cells, (cell) => cell.textContent.trim());
    const rows = Array.from(table.tBodies[0].rows);
    const bar = document.createElement("div");
    bar.className = "feature-filters";
    const words = document.createElement("input");
    words.type = "search";
    words.placeholder = "words";
    words.setAttribute("aria-label", "words");
    bar.append(words);
    const choices = ["category", "level", "numerics"].map((title) => {
      const column = titles.indexOf(title);
      const choice = document.createElement("select");
      choice.setAttribute("aria-label", title);
      choice.append(new Option("any " + title, ""));
      const values = new Set(rows.map((row) => row.cells[column].textContent.trim()));
      Array.from(values).sort().forEach((value) => choice.append(new Option(title + ": " + value, value)));
      bar.append(choice);
      return [column, choice];
    });
    bar.addEventListener("input", () => {
      const wanted = words.value.toLowerCase().split(/\s+/);
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        const shown = wanted.every((word) => text.includes(word)) &&
          choices.every(([column, choice]) => !choice.value || row.cells[column].textContent.trim() === choice.value);
        row.hidden = !shown;
      });
    });
    (table.closest(".md-typeset__scrollwrap") || table).before(bar);
  }
  document.querySelectorAll("article table").forEach((table) => {
    if (table.tHead && /^feature\s*category/.test(table.tHead.textContent.trim().replace(/\s+/g, " "))) filters(table);
  });
})();
