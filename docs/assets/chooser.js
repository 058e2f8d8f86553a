// The form of the page "Which format should I take?": a table and a budget in, a line of code and what to expect out.
"use strict";

(() => {
  const place = document.getElementById("chooser");
  if (!place) return;

  // Bytes a table takes. They are the library's own sizes, and the test of this page compares them with it.
  const quantized = (bits, group) => (rows, dim) =>
    rows * (bits === 8 ? dim : Math.ceil(dim / 2)) + (group < dim ? rows * Math.ceil(dim / group) : 0) + 4 * rows;
  const hotRows = (rows, dim) => {
    const hot = Math.min(Math.max(1, Math.floor(0.06 * rows)), rows - 1);
    return quantized(8, Infinity)(hot, dim) + quantized(4, 32)(rows - hot, dim) + 8 * hot;
  };
  const product = (rows, dim, parts) => rows * parts + 4 * 256 * dim;

  // The most parts of a row, each a byte, at which a table is still as many times smaller; undefined where none are.
  const partsFor = (rows, dim, ratio) =>
    Array.from({ length: dim }, (_, i) => dim - i).find((parts) => dim % parts === 0 && (4 * rows * dim) / product(rows, dim, parts) >= ratio);

  // Formats for trained tables by the name of their points: the code, and the bytes where no ratio sets them.
  const TRAINED = {
    "bits=8": { code: () => "tb.QuantizedRows(bits=8)", bytes: quantized(8, Infinity) },
    "bits=4, group=16": { code: () => "tb.QuantizedRows(bits=4, group=16)", bytes: quantized(4, 16) },
    "bits=4, group=32": { code: () => "tb.QuantizedRows(bits=4)", bytes: quantized(4, 32) },
    "hot rows": { code: () => "tb.HotRows()", bytes: hotRows },
    pq: { code: (ratio) => `tb.ProductQuantized(ratio=${ratio})` },
  };
  const ranked = (name) => ({ code: (ratio) => `tb.${name}(ratio=${ratio})` });
  const DRAWN = {
    tensor_train: ranked("TensorTrain"),
    "tensor_train(order=3)": ranked("TensorTrain"),
    "tensor_train(order=4)": { code: (ratio) => `tb.TensorTrain(ratio=${ratio}, order=4)` },
    tensor_ring: ranked("TensorRing"),
    low_rank: ranked("LowRank"),
    canonical_polyadic: ranked("CanonicalPolyadic"),
    nonlinear_train: ranked("NonlinearTrain"),
    hashed: ranked("Hashed"),
    quotient_remainder: ranked("QuotientRemainder"),
    deep_hash: ranked("DeepHash"),
    bands: ranked("Bands"),
    // Packed, cores take nearly a quarter; 3.5 leaves room for their scales.
    "straight_through(format=tensor_train)": {
      code: (ratio) => `tb.StraightThrough(tb.TensorTrain(ratio=${Math.ceil((10 * ratio) / 3.5) / 10}), bits=8)`,
      packed: true,
    },
  };

  const CASES = {
    "train a language model": { study: "language model", line: (code, rows, dim) => `embedding, head = tb.embedding_and_head(${rows}, ${dim}, ${code})` },
    "train a classifier": { study: "classifier", line: (code, rows, dim) => `embedding = tb.Embedding(${rows}, ${dim}, ${code})` },
    "train a recommender": { study: "recommender", line: (code, rows, dim) => `field = tb.EmbeddingBag(${rows}, ${dim}, ${code}, mode="sum")` },
    "compress an encoder": { study: "encoder", trained: true },
    "compress a language model with tied ends": { study: "tied language model", trained: true },
  };

  const COMPRESS = (code, calibrated) => `report = tb.compress_(model, ${code}${calibrated ? ", calibrate=run" : ""})`;
  const count = (number) => number.toLocaleString("en");
  const size = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toPrecision(3)} kB` : `${count(Number((bytes / 1e6).toPrecision(3)))} MB`);

  // A point as an answer, or undefined where its format cannot be as small as asked for or was not measured there.
  const answered = (point, asked) => {
    const { rows, dim, ratio, trained, texts } = asked;
    const format = (trained ? TRAINED : DRAWN)[point.format];
    if (!format || (point.calibrated && !texts)) return undefined;
    const dense = 4 * rows * dim;
    let bytes = format.bytes?.(rows, dim);
    if (point.format === "pq") {
      const parts = partsFor(rows, dim, ratio);
      if (!parts || point.columns < dim / parts) return undefined;
      bytes = product(rows, dim, parts);
    } else if (bytes ? dense / bytes < ratio : point.ratio < ratio) return undefined;
    return { ...point, code: format.code(ratio), packed: format.packed, ratio: dense / (bytes ?? dense / ratio), measured: point.ratio, exact: Boolean(bytes), bytes: bytes ?? dense / ratio };
  };

  // The best point of each format, best first.
  const ordered = (points, study) => {
    const worth = (point) => (study.higher ? -1 : 1) * (point.chosenBy ?? point.quality);
    const sorted = points.toSorted((a, b) => worth(a) - worth(b) || b.measured - a.measured);
    return measured.grouped(sorted, (point) => point.code).map((group) => group[0]);
  };

  const expected = (answer, study, full) => {
    const seeds = answer.seeds ? `, ${answer.seeds} ${answer.seeds === 1 ? "seed" : "seeds"}` : "";
    const beside = full ? ` beside ${full.toFixed(study.digits)} with the full table` : "";
    return `${measured.told(study, answer.quality)}${beside} (measured ${answer.measured.toFixed(1)} times smaller${seeds})`;
  };

  const element = (name, content, attributes = {}) => {
    const made = Object.assign(document.createElement(name), attributes);
    made.append(...[content].flat());
    return made;
  };
  const codeBlock = (line) => element("pre", element("code", line, { className: "chooser-code" }));

  const sizes = (answer, asked) => {
    const [most, least] = answer.exact ? ["", ""] : ["at most ", "at least "];
    const when = answer.packed ? " once it is packed after training" : "";
    return `The table takes ${most}${size(answer.bytes)} instead of ${size(4 * asked.rows * asked.dim)} in float32${when}: ${least}${answer.ratio.toFixed(1)} times smaller.`;
  };

  const notes = (asked) => [
    ...(asked.rows < 2000 ? ["Tables below 2,000 rows are rarely worth it; tb.compress_ leaves them alone unless min_rows= says otherwise."] : []),
    ...(asked.texts && asked.trained ? ["run is your function: it takes the model and runs it on typical inputs."] : []),
  ];

  const toAsk = (form) => {
    const [rows, dim, budget] = ["rows", "dim", "budget"].map((name) => Number(form.elements[name].value));
    const name = form.elements.have.value;
    const asked = { ...CASES[name], rows, dim, texts: form.elements.texts.checked };
    if (![rows, dim].every((number) => Number.isInteger(number) && number > 0) || !(budget > 0)) return undefined;
    const ratio = form.elements.unit.value === "MB" ? (4 * rows * dim) / (1e6 * budget) : budget;
    return { ...asked, ratio: Math.ceil(100 * Math.max(ratio, 1.01)) / 100 };
  };

  const unmeasured = (asked) => {
    const code = asked.trained ? undefined : `tb.TensorTrain(ratio=${asked.ratio})`;
    const words = asked.trained
      ? `No format was measured that keeps a trained table and is ${asked.ratio} times smaller here. Ask for less${asked.texts ? "" : ", calibrate on typical texts"}, or train the model after a fit.`
      : `Nothing was measured that is ${asked.ratio} times smaller. This line makes such a table if there is one; train it and compare.`;
    return [...(code ? [codeBlock(asked.line(code, asked.rows, asked.dim))] : []), element("p", words)];
  };

  const answer = async (asked) => {
    if (!asked) return [element("p", "Rows and numbers a row are whole numbers above 0, and the budget is above 0.")];
    const line = (point) => (asked.trained ? COMPRESS(point.code, point.calibrated) : asked.line(point.code, asked.rows, asked.dim));
    const told = notes(asked).map((note) => element("p", note, { className: "chooser-note" }));
    const study = measured.STUDIES[asked.study];
    const points = await study.points();
    const full = points.find((point) => point.format === "full")?.quality ?? points[0].full;
    const [best, ...others] = ordered(points.map((point) => answered(point, asked)).filter(Boolean), study);
    if (!best) return [...unmeasured(asked), ...told];
    const more = others.slice(0, 2).map((point) => element("li", [element("code", point.code), `: ${expected(point, study, 0)}`]));
    return [
      codeBlock(line(best)),
      element("p", sizes(best, asked)),
      element("p", [`Expect, on ${study.where}: `, element("strong", expected(best, study, full)), ". ", element("a", "All lines", { href: new URL(study.page, measured.site) }), "."]),
      ...(more.length ? [element("p", "Next best:"), element("ul", more)] : []),
      ...told,
    ];
  };

  const choice = (names) => names.map((name) => element("option", name, { value: name }));
  const field = (label, ...controls) => element("label", [element("span", label), ...controls]);
  const number = (name, value, step) => Object.assign(document.createElement("input"), { type: "number", name, value, min: step, step });

  const trainedOr = (trained) => Object.keys(CASES).filter((name) => Boolean(CASES[name].trained) === trained);
  const have = element("select", [
    element("optgroup", choice(trainedOr(false)), { label: "Nothing is trained yet" }),
    element("optgroup", choice(trainedOr(true)), { label: "The table is trained already" }),
  ], { name: "have" });
  const texts = element("label", [Object.assign(document.createElement("input"), { type: "checkbox", name: "texts" }), " I have typical texts to calibrate with"], { className: "chooser-check" });
  const form = element("form", [
    field("I want to", have),
    field("Rows of the table", number("rows", 50000, 1)),
    field("Numbers a row", number("dim", 512, 1)),
    field("Budget", element("span", [number("budget", 30, "any"), element("select", [element("option", "times smaller", { value: "ratio" }), element("option", "MB at most", { value: "MB" })], { name: "unit" })], { className: "chooser-budget" })),
    texts,
  ]);
  const output = element("output", "");
  output.setAttribute("aria-live", "polite");
  place.append(form, output);

  const update = async () => {
    const asked = toAsk(form);
    texts.hidden = !asked?.trained;
    let content;
    try {
      content = await answer(asked);
    } catch (reason) {
      content = [element("p", `The result lines could not be read (${reason.message}). The sections below say what to take.`)];
    }
    output.replaceChildren(...content);
    output.dataset.ready = "yes";
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();
