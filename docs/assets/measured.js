// The committed result lines as points: how many times smaller a table was, and what became of its model.
"use strict";

const measured = (() => {
  const site = new URL("..", document.currentScript.src);
  const lines = {}; // a promise for each file, which is fetched once

  const read = (name) =>
    (lines[name] ??= fetch(new URL(`results/${name}.jsonl`, site))
      .then((answer) => (answer.ok ? answer.text() : Promise.reject(new Error(`${name}.jsonl: ${answer.status}`))))
      .then((text) => text.trim().split("\n").map((line) => JSON.parse(line))));

  const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

  const grouped = (items, key) => {
    const groups = new Map();
    for (const item of items) groups.set(key(item), [...(groups.get(key(item)) ?? []), item]);
    return [...groups.values()];
  };

  // Runs of one row differ by their seed; where a seed was run again, the last line holds.
  const overSeeds = (runs, quality) =>
    grouped(runs, (run) => run.row).map((row) => {
      const last = Object.values(Object.fromEntries(row.map((run) => [run.seed, run])));
      return {
        format: row[0].format,
        ratio: last[0].ratio,
        quality: mean(last.map((run) => run[quality])),
        chosenBy: mean(last.map((run) => run.val_accuracy ?? run.val_logloss ?? run[quality])),
        seeds: last.length,
      };
    });

  const ofModel = (model, quality) => async () =>
    (await read("compression"))
      .filter((line) => line.model.startsWith(model) && line.structure)
      .map((line) => ({
        format: line.structure.startsWith("quantized") ? line.structure.replace("quantized_rows, ", "") : line.family,
        calibrated: line.calibrated,
        ratio: line.ratio,
        columns: Number(/parts=\d+ of (\d+)/.exec(line.structure)?.[1]),
        quality: quality(line),
        full: line.base_perplexity ?? 0,
      }));

  const byTime = (runs) => runs.toSorted((a, b) => (a.time < b.time ? -1 : 1));

  // What was measured, by the question that it answers. Points of the full table have the format "full".
  const STUDIES = {
    "language model": {
      points: async () => overSeeds(byTime((await read("source_code_league")).filter((run) => run.ratio)), "val_perplexity"),
      quality: "validation perplexity",
      digits: 1,
      most: 50,
      page: "results/source_code_league/",
      where: "a small language model of Python source, with tables of 10,000 x 96",
    },
    classifier: {
      points: async () => {
        const runs = (await read("sentiment")).filter((run) => run.dataset === "sst5" && !run.row.includes("-"));
        return overSeeds(byTime(runs), "test_accuracy");
      },
      quality: "test accuracy",
      digits: 3,
      higher: true,
      page: "results/sentiment/",
      where: "the paper's classifier of SST-5, with a table of 17,200 x 256",
    },
    recommender: {
      points: async () => {
        // The samples of Criteo beside it are too small to tell formats apart.
        const runs = (await read("click_through")).filter((run) => run.dataset === "book-crossing" && run.row !== "full_once");
        return overSeeds(byTime(runs), "test_logloss");
      },
      quality: "test log-loss",
      digits: 4,
      page: "results/click_through/",
      where: "ratings of Book-Crossing, with tables of readers, books, authors and publishers of up to 45,681 x 16",
    },
    encoder: {
      points: ofModel("all-MiniLM", (line) => 1 - line.mean_cosine),
      quality: "1 - mean cosine",
      told: (value) => `mean cosine ${(1 - value).toFixed(4)}`,
      logarithmic: true,
      page: "results/compression/#all-minilm-l6-v2",
      where: "all-MiniLM-L6-v2, with a table of 30,522 x 384",
    },
    "tied language model": {
      points: ofModel("SmolLM2", (line) => line.perplexity),
      quality: "perplexity",
      digits: 2,
      most: 100,
      page: "results/compression/#smollm2-135m-instruct",
      where: "SmolLM2-135M-Instruct, with a table of 49,152 x 576 at both ends",
    },
  };

  const NAMES = {
    tensor_train: "tensor train",
    "tensor_train(order=3)": "tensor train, 3 cores",
    "tensor_train(order=4)": "tensor train, 4 cores",
    tensor_ring: "tensor ring",
    low_rank: "low rank",
    canonical_polyadic: "canonical polyadic",
    nonlinear_train: "non-linear train",
    hashed: "hashed",
    quotient_remainder: "quotient and remainder",
    deep_hash: "deep hash",
    bands: "bands",
    "straight_through(format=tensor_train)": "tensor train, cores in 8 bits",
    "straight_through(format=low_rank, bits=4)": "low rank, factors in 4 bits",
    "bits=8": "8 bits",
    "bits=4, group=16": "4 bits",
    "bits=4, group=32": "4 bits",
    pq: "product quantisation",
    TT: "tensor train",
  };

  const named = (point) => `${NAMES[point.format] ?? point.format}${point.calibrated ? ", calibrated" : ""}`;

  const told = (study, value) => study.told?.(value) ?? `${study.quality} ${value.toFixed(study.digits)}`;

  return { STUDIES, grouped, named, told, site };
})();
