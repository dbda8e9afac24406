// Ranks under their hosts: which rows the heat map has, and the values that stand for a host.

/** The number of a row that stands for a whole host; a rank's row has its place, from 0 on. */
export const hostRow = (/** @type {number} */ host) => -1 - host;

/** The places of each host's ranks; none unless every rank's host is known and there are several. @param {number[]} hostOfRank @param {number} hosts @returns {number[][]} */
export function placesByHost(hostOfRank, hosts) {
  if (hosts < 2 || hostOfRank.some((host) => host < 0)) return [];
  const places = Array.from({ length: hosts }, () => /** @type {number[]} */ ([]));
  hostOfRank.forEach((host, place) => places[host].push(place));
  return places;
}

// The rank that the others wait for takes longest and waits least: it stands for its host.
/** @param {string} metric */
export const standsFor = (metric) => (metric === "comm" ? "smallest" : "largest");

/** Host by host, for each step the value of the rank that stands for the host. @param {string} metric @param {Float64Array} values @param {number[][]} byHost @param {number} steps */
export function hostValues(metric, values, byHost, steps) {
  const out = new Float64Array(byHost.length * steps).fill(NaN);
  const smallest = standsFor(metric) === "smallest";
  byHost.forEach((places, host) => places.forEach((place) => {
    for (let step = 0; step < steps; step++) {
      const [value, at] = [values[place * steps + step], host * steps + step];
      if (Number.isNaN(value)) continue;
      if (Number.isNaN(out[at]) || (smallest ? value < out[at] : value > out[at])) out[at] = value;
    }
  }));
  return out;
}

/** Rows under their hosts. Where all ranks would not fit, hosts stand for their ranks, except open ones. @param {number[][]} byHost @param {{ folded: boolean, open: Set<number>, worth?: ArrayLike<number> }} how `worth`: the hosts with the most come first @returns {number[]} */
export function rowsByHost(byHost, { folded, open, worth }) {
  const hosts = byHost.map((_, host) => host);
  if (worth) hosts.sort((a, b) => (worth[b] || 0) - (worth[a] || 0) || a - b);
  return hosts.flatMap((host) => (folded ? [hostRow(host), ...(open.has(host) ? byHost[host] : [])] : byHost[host]));
}

/** 8-11, 14: runs of consecutive numbers. @param {number[]} numbers */
export function rangeWords(numbers) {
  const runs = /** @type {number[][]} */ ([]);
  numbers.forEach((number) => {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  });
  const words = runs.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`));
  return words.length > 6 ? `${words.slice(0, 6).join(", ")}, …` : words.join(", ");
}
