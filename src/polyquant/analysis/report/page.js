"use strict";
(() => {
  const root = document.documentElement;
  const say = document.getElementById("status");

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  const tip = document.getElementById("tip");
  const place = (x, y) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 16 + box.height > innerHeight ? y - box.height - 8 : y + 16}px`;
  };

  // Tables: sort by a column, copy one as tab-separated text.
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
        rows.sort(([a], [b]) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, {numeric: true})));
        if (down) rows.reverse();
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    say.textContent = "copied";
  };
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () => {
      const rows = [...document.getElementById(button.dataset.copy).rows];
      const plain = (cell) => (cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value);
      copy(rows.map((row) => [...row.cells].map(plain).join("\t")).join("\n"));
    });
  }

  // Numbers: a click copies the exact value.
  document.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-value]");
    if (!cell || getSelection().toString()) return;
    copy(cell.dataset.value);
    tip.textContent = `${cell.dataset.value} copied`;
    place(event.clientX, event.clientY);
    setTimeout(() => { tip.hidden = true; }, 1500);
  });

  // Charts: the values of a mark on hover, and with the arrow keys once a chart has the focus.
  const show = (mark, x, y) => {
    tip.textContent = mark.getAttribute("aria-label");
    place(x, y);
  };
  const GUIDES = ["axis", "legend", "symbol legend", "gradient legend", "title", "subtitle"];
  const MARKS = '[role="graphics-symbol"][aria-label]'
    + GUIDES.map((kind) => `:not([aria-roledescription="${kind}"])`).join("");
  for (const chart of document.querySelectorAll(".chart")) {
    const marks = [...chart.querySelectorAll(MARKS)];
    let at = -1;
    chart.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(MARKS);
      if (mark) show(mark, event.clientX, event.clientY);
      else tip.hidden = true;
    });
    chart.addEventListener("pointerleave", () => { tip.hidden = true; });
    chart.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (!marks.length || (!step && !["Home", "End", "Escape"].includes(event.key))) return;
      event.preventDefault();
      marks[at]?.classList.remove("here");
      if (event.key === "Escape") { tip.hidden = true; return; }
      at = event.key === "Home" ? 0 : event.key === "End" ? marks.length - 1
        : (Math.max(at, step > 0 ? -1 : 0) + step + marks.length) % marks.length;
      marks[at].classList.add("here");
      const box = marks[at].getBoundingClientRect();
      show(marks[at], box.left + box.width / 2, box.top + box.height / 2);
      say.textContent = tip.textContent;
    });
    chart.addEventListener("blur", () => { marks[at]?.classList.remove("here"); tip.hidden = true; });
  }
  addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("details")) d.open = true; });
})();
