// The order of a bench's workloads, and which of them are shown: the same in all charts.

/** Places of the rows, sorted by a column; rows without a value come last. @param {BenchValues[]} rows @param {number} column -1 keeps the order @param {boolean} down */
export function orderRows(rows, column, down) {
  const places = rows.map((_, place) => place);
  if (column < 0) return places;
  const way = down ? -1 : 1;
  return places.sort((a, b) => {
    const [x, y] = [rows[a].values[column], rows[b].values[column]];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a - b;
    return way * (x - y) || a - b;
  });
}

/** Keys of the rows that hold every word. @param {BenchValues[]} rows @param {string} words */
export function matchingKeys(rows, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return new Set(rows.filter((row) => wanted.every((word) => row.words.toLowerCase().includes(word))).map((row) => row.key));
}
