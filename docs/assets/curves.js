// Curves of what was measured, one figure for each study: times smaller against quality, a line for each format.
"use strict";

(() => {
  const HEIGHT = 340, LEFT = 72, RIGHT = 12, TOP = 12, BOTTOM = 46;
  // Legible on white and on black, as those of pages/pictures.py.
  const COLOURS = ["#2f7fd8", "#e0793a", "#1f9d76", "#b5479a", "#a3841c", "#d1495b", "#6a5acd", "#2a93a8", "#8a6d5b", "#64748b", "#4d8f2f"];

  const svg = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // From a range of numbers to a range of pixels.
  const scale = (low, high, from, to, logarithmic) => {
    const turned = logarithmic ? Math.log : (x) => x;
    return (x) => from + ((turned(x) - turned(low)) / (turned(high) - turned(low))) * (to - from);
  };

  const ticks = (low, high, logarithmic) => {
    if (logarithmic) {
      const powers = Array.from({ length: 16 }, (_, i) => 10 ** (i - 8));
      return powers.flatMap((power) => [power, 3 * power]).filter((x) => x >= low && x <= high);
    }
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
    return Array.from({ length: 12 }, (_, i) => (Math.ceil(low / step) + i) * step).filter((x) => x <= high);
  };

  const shortened = (x) => (x >= 1000 ? x.toLocaleString("en") : String(Number(x.toPrecision(3))));

  const axes = (drawing, width, x, y, limits, study) => {
    for (const tick of ticks(limits.x[0], limits.x[1], true)) {
      drawing.append(svg("line", { x1: x(tick), x2: x(tick), y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" }));
      drawing.append(svg("text", { x: x(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, shortened(tick)));
    }
    for (const tick of ticks(limits.y[0], limits.y[1], study.logarithmic)) {
      drawing.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }));
      drawing.append(svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, shortened(tick)));
    }
    drawing.append(svg("text", { x: (LEFT + width) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "times smaller"));
    const middle = (TOP + HEIGHT - BOTTOM) / 2;
    drawing.append(svg("text", { transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle" }, study.quality));
  };

  const drawn = (study, points, width) => {
    const full = points.find((point) => point.format === "full")?.quality ?? points[0].full;
    const shown = points.filter((point) => point.format !== "full" && point.quality <= (study.most ?? Infinity));
    const values = [...shown.map((point) => point.quality), ...(full ? [full] : [])];
    const margin = study.logarithmic ? 0 : 0.06 * (Math.max(...values) - Math.min(...values));
    const ratios = shown.map((point) => point.ratio);
    const limits = {
      x: [0.85 * Math.min(...ratios), 1.15 * Math.max(...ratios)],
      y: study.logarithmic
        ? [0.7 * Math.min(...values), 1.4 * Math.max(...values)]
        : [Math.min(...values) - margin, Math.max(...values) + margin],
    };
    const x = scale(...limits.x, LEFT, width - RIGHT, true);
    const y = scale(...limits.y, HEIGHT - BOTTOM, TOP, study.logarithmic);
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
    drawing.append(svg("title", {}, `${study.quality} by how many times smaller the table is, on ${study.where}`));
    axes(drawing, width, x, y, limits, study);
    if (full) {
      drawing.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(full), y2: y(full), class: "full" }));
      drawing.append(svg("text", { x: width - RIGHT, y: y(full) + 14, "text-anchor": "end" }, "full table"));
    }
    const legend = document.createElement("figcaption");
    measured.grouped(shown, measured.named).forEach((group, place) => {
      const colour = COLOURS[place % COLOURS.length];
      const row = group.toSorted((a, b) => a.ratio - b.ratio);
      const path = row.map((point) => `${x(point.ratio).toFixed(1)},${y(point.quality).toFixed(1)}`).join(" ");
      const dashes = row[0].calibrated ? { "stroke-dasharray": "6 4" } : {};
      drawing.append(svg("polyline", { points: path, fill: "none", stroke: colour, "stroke-width": 2, ...dashes }));
      for (const point of row) {
        const circle = svg("circle", { cx: x(point.ratio), cy: y(point.quality), r: 4, fill: colour });
        const seeds = point.seeds ? `, ${point.seeds} ${point.seeds === 1 ? "seed" : "seeds"}` : "";
        const told = `${measured.told(study, point.quality)}${seeds}`;
        circle.append(svg("title", {}, `${measured.named(point)}, ${point.ratio.toFixed(1)} times smaller: ${told}`));
        drawing.append(circle);
      }
      const entry = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.background = colour;
      entry.append(swatch, measured.named(row[0]));
      legend.append(entry);
    });
    return [drawing, legend];
  };

  const show = async (figure) => {
    const study = measured.STUDIES[figure.dataset.measured];
    try {
      figure.append(...drawn(study, await study.points(), Math.min(640, figure.clientWidth)));
    } catch (reason) {
      figure.append(`The result lines could not be read (${reason.message}); the linked page has them as a table.`);
    }
  };

  document.querySelectorAll("figure[data-measured]").forEach(show);
})();
