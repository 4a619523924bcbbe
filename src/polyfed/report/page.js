"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll("[data-figure]")];
  const visible = (element) => element.offsetParent !== null;
  let printing = false;

  // --- colors: figures hold those of the light page; a dark page swaps them ---
  const theme = () => (printing ? "light" : root.dataset.theme);
  const swap = (value) => {
    if (typeof value === "string") return report.dark[value] ?? value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(swap);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, swap(item)]));
    }
    return value;
  };
  const colored = (figure) => (theme() === "dark" ? swap(figure) : structuredClone(figure));

  // --- many methods: families can be chosen, and charts begin with a few ---
  const families = report.families ?? {};
  let chosen = new Set();
  const isChosen = (method) => !chosen.size || !(method in families) || chosen.has(families[method]);
  const isShown = (method) => (chosen.size || !(method in families) ? isChosen(method) : report.shown.includes(method));
  const narrow = (trace, _, all) => {
    const method = trace.legendgroup ?? trace.name;
    if (!isChosen(method)) trace.visible = false;
    else if (trace.legendgroup in families && !isShown(method)) {
      if (trace.mode?.includes("lines")) trace.visible = "legendonly";
      // The names of so many would leave no room for the points.
      else if (trace.showlegend && all.length > 15) trace.visible = false;
    }
  };
  const narrowRows = ({ data, layout }) => { // a chart with a row or two for each method
    const ticks = layout.yaxis.ticktext ?? [];
    const method = (tick) => (tick in families ? tick : tick.replace(/ (sent|received)$/, ""));
    if (!ticks.some((tick) => method(tick) in families)) return;
    const kept = ticks.map((tick, row) => row).filter((row) => isShown(method(ticks[row])));
    const place = new Map(kept.map((row, now) => [row, now]));
    const pick = (list, rows) => (Array.isArray(list) && list.length === rows.length ? list.filter((_, i) => rows[i]) : list);
    for (const trace of data) {
      const rows = trace.y.map((y) => place.has(Math.round(y)));
      for (const key of ["x", "hovertext", "text"]) trace[key] = pick(trace[key], rows);
      if (trace.error_x) trace.error_x.array = pick(trace.error_x.array, rows);
      trace.y = trace.y.filter((_, i) => rows[i]).map((y) => place.get(Math.round(y)) + y - Math.round(y));
      if (!trace.y.length) trace.visible = false;
    }
    const each = (layout.height - 130) / ticks.length;
    layout.height = 130 + each * kept.length;
    layout.yaxis.ticktext = kept.map((row) => ticks[row]);
    layout.yaxis.tickvals = kept.map((_, now) => now);
    layout.yaxis.range = [-0.6, kept.length - 0.4];
  };

  // --- charts ---
  const options = (name) => ({
    responsive: true,
    displaylogo: false,
    scrollZoom: false,
    doubleClick: false,
    modeBarButtons: [["toImage"]],
    toImageButtonOptions: { format: "png", filename: name, scale: 2 },
  });
  const fitted = (layout, width) => {
    if (width < 560 && !printing) {
      layout.font.size = 11.5;
      layout.legend.font.size = 11.5;
      layout.yaxis.tickfont.size = layout.xaxis.tickfont.size = 10.5;
      layout.yaxis.title.text = "";
      layout.margin.r = 4;
      if (layout.xaxis.ticktext?.length > 6) {
        layout.xaxis.ticktext = layout.xaxis.ticktext.map((text) => text.split("<br>")[0]);
      }
      if (layout.xaxis.ticktext && layout.xaxis.ticktext.some((text) => text.length > 3)) layout.xaxis.tickangle = -40;
    }
    if (printing) {
      layout.width = width;
      layout.height = Math.round(layout.height * 0.8);
    }
    return layout;
  };
  const draw = (element) => {
    const name = element.dataset.figure;
    const figure = colored(report.figures[name]);
    const hiddenNames = new Set((element.data ?? []).filter((t) => t.visible === "legendonly").map((t) => t.name));
    if (report.families) {
      figure.data.forEach(narrow);
      narrowRows(figure);
    }
    for (const trace of figure.data) if (hiddenNames.has(trace.name)) trace.visible = "legendonly";
    element.style.minHeight = `${figure.layout.height}px`;
    const width = printing ? (element.closest(".pair") ? 330 : 690) : element.clientWidth;
    return Plotly.react(element, figure.data, fitted(figure.layout, width), options(name));
  };
  const drawVisible = () => Promise.all(charts.filter(visible).map(draw));
  const unpack = async () => {
    const packed = document.getElementById("plotly-library");
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
  };

  // --- light and dark ---
  const button = document.getElementById("theme");
  const setTheme = (name) => {
    root.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    if (window.Plotly) drawVisible();
  };
  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  button.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));

  // --- tabs ---
  for (const group of document.querySelectorAll(".tabs")) {
    const buttons = [...group.querySelectorAll("[role=tab]")];
    const choose = (chosen) => {
      for (const tab of buttons) {
        const selected = tab === chosen;
        tab.setAttribute("aria-selected", selected);
        tab.tabIndex = selected ? 0 : -1;
        const panel = document.getElementById(tab.getAttribute("aria-controls"));
        panel.hidden = !selected;
        if (selected && window.Plotly) panel.querySelectorAll("[data-figure]").forEach(draw);
      }
    };
    buttons.forEach((tab, place) => {
      tab.tabIndex = place ? -1 : 0;
      tab.addEventListener("click", () => choose(tab));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = buttons[(place + step + buttons.length) % buttons.length];
        choose(next);
        next.focus();
      });
    });
  }

  // --- tables sort: numbers largest first, words in their order, empty cells always last ---
  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.querySelectorAll("thead tr:last-child th")];
    headings.forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        const number = heading.classList.contains("number");
        const before = heading.getAttribute("aria-sort");
        const descending = before ? before === "ascending" : number;
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const body = table.tBodies[0];
        const key = (row) => row.cells[column].dataset.value;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          if (x === "" || y === "") return (x === "") - (y === "");
          const order = number ? Number(x) - Number(y) : x.localeCompare(y, undefined, { numeric: true });
          return descending ? -order : order;
        });
        body.append(...rows);
      });
    });
  }

  const filter = document.getElementById("filter");
  if (filter) {
    const apply = () => {
      for (const row of document.querySelectorAll("table.sortable tbody tr")) {
        row.hidden = !isChosen(row.cells[0].dataset.value);
      }
      for (const element of charts) if (element.data) Plotly.purge(element);
      if (window.Plotly) drawVisible();
    };
    for (const family of [...new Set(Object.values(families))].sort()) {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.textContent = family || "other";
      chip.setAttribute("aria-pressed", "false");
      chip.addEventListener("click", () => {
        const on = chip.getAttribute("aria-pressed") !== "true";
        chip.setAttribute("aria-pressed", on);
        if (on) chosen.add(family);
        else chosen.delete(family);
        apply();
      });
      filter.append(chip);
    }
  }

  // --- paper is light, and shows every tab ---
  const toPaper = () => {
    printing = true;
    root.dataset.screen = root.dataset.theme;
    root.dataset.theme = "light";
    document.querySelectorAll(".panel[hidden]").forEach((panel) => {
      panel.hidden = false;
      panel.dataset.wasHidden = "";
    });
    charts.forEach(draw);
  };
  const fromPaper = () => {
    printing = false;
    root.dataset.theme = root.dataset.screen;
    document.querySelectorAll("[data-was-hidden]").forEach((panel) => {
      panel.hidden = true;
      delete panel.dataset.wasHidden;
    });
    drawVisible();
  };
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);

  unpack()
    .then(drawVisible)
    .then(() => { root.dataset.ready = "yes"; })
    .catch((error) => {
      document.getElementById("failure").hidden = false;
      console.error(error);
    });
})();
