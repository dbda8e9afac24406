// Panels as a server would send them, for the tests.

import { readPanel, type Panel } from "../src/contract";

export const SCRIPT = "file:///home/someone/train.py";

/** 10 ms and 1 ms a sample; memory 100 MB and 10 MB a sample; intervals of a tenth. */
export const point = (batch: number): Record<string, number> => {
  const stepMs = 10 + batch;
  const peakBytes = 1e8 + 1e7 * batch;
  return {
    batch, stepMs, lowMs: 0.9 * stepMs, highMs: 1.1 * stepMs, samplesPerSecond: (1000 * batch) / stepMs,
    peakBytes, peakLowBytes: 0.9 * peakBytes, peakHighBytes: 1.1 * peakBytes,
  };
};

export const rawPanel = (changes: Record<string, unknown> = {}): Record<string, unknown> => ({
  state: "measured", verdict: "The host launches work too slowly.", stepMs: 42, lowMs: 40.1, highMs: 43.8,
  samplesPerSecond: 762, peakBytes: 4.2e8, capacityBytes: 8e8,
  batch: { value: 32, line: 11, points: [8, 16, 32, 64, 128].map(point) }, batchElsewhere: null,
  time: [
    { name: "forward", ms: 14, share: 1 / 3, uri: SCRIPT, line: 20, children: [
      { name: "attention", ms: 9, share: 0.21, uri: SCRIPT, line: 30, children: [] },
      { name: "<img src=x onerror=alert(1)>", ms: 3, share: 0.07, uri: "file:///home/someone/model.py", line: 4, children: [] },
    ] },
    { name: "backward", ms: 24, share: 0.57, uri: SCRIPT, line: 22, children: [] },
    { name: "not in your lines", ms: 4, share: 0.1, uri: null, line: null, children: [] },
  ],
  memory: [{ name: "activations", bytes: 3e8, share: 0.71, uri: null, line: null, children: [] }],
  gpus: [
    { gpu: "L4", stepMs: 80, lowMs: 70, highMs: 90, fits: false, decides: "device" },
    { gpu: "A100-PCIE-40GB", stepMs: 30, lowMs: 27, highMs: 34, fits: true, decides: "host" },
  ],
  report: "/home/someone/report.html", runningSince: null, error: null,
  ...changes,
});

export const panel = (changes: Record<string, unknown> = {}): Panel => readPanel(rawPanel(changes));
