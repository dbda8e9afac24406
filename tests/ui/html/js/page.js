// A page with nothing in it but the words that Python sends. Import this before the page's own code.

/** @type {any} */ (globalThis).document = {
  querySelector: () => ({
    textContent: JSON.stringify({
      classes: ["compute", "comm", "operator"],
      classWords: { compute: "compute kernel" },
      causes: ["data_loading", "other"],
      causeLabels: { data_loading: "Data loading" },
      collectives: ["all_reduce"],
      stalls: ["data", "gc"],
      names: ["aten", "torch"],
    }),
  }),
};
