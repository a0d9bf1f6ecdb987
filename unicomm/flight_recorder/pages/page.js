"use strict";
// The theme switch, the sorting of tables, and tables that scroll by keyboard.
// Controls are made here, so that none is shown without scripts.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const SUN =
    '<circle cx="8" cy="8" r="3"/><path d="M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1"/>';
  const MOON = '<path d="M13.5 9.7A6 6 0 0 1 6.3 2.5a6 6 0 1 0 7.2 7.2z"/>';
  const theme = document.createElement("button");
  theme.id = "theme";
  theme.type = "button";
  const name = () => {
    theme.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true">${dark() ? SUN : MOON}</svg>`;
    theme.append(dark() ? "Light theme" : "Dark theme");
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
  document.querySelector("body > header").append(theme);

  for (const part of document.querySelectorAll(".scroll")) {
    new ResizeObserver(() => {
      if (part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight) part.tabIndex = 0;
      else part.removeAttribute("tabindex");
    }).observe(part);
  }

  const value = row => column => {
    const cell = row.cells[column],
      number = parseFloat(cell.dataset.sort);
    return Number.isNaN(number) ? cell.textContent : number;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.dataset.fixed !== undefined) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        // Numbers begin with the largest, names with the first.
        const up =
          head.ariaSort === "descending" || (head.ariaSort !== "ascending" && !head.matches(".number"));
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
        const rows = [...table.tBodies[0].rows].map(row => [value(row)(column), row]);
        rows.sort(([a], [b]) => (up ? order(a, b) : order(b, a)));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
})();
