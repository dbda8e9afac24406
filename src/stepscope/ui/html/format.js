// Numbers and names as people read them.

const Format = (() => {
  const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

  const NAMES = new Set(WORDS.names);

  function significant(value) {
    const size = Math.abs(value);
    return value.toFixed(size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : 2);
  }

  function scaled(value, units) {
    const [size, unit] = units.find(([s]) => Math.abs(value) >= s) || units[units.length - 1];
    return `${significant(value / size)} ${unit}`;
  }

  const ns = (value) => (value === 0 ? "0" : scaled(value, UNITS));
  const bytes = (value) => (value === 0 ? "0" : scaled(value, BYTES));
  const count = (value) => value.toLocaleString("en-US");
  const rate = (value) => `${significant(value)} GB/s`;

  function percent(share) {
    const value = share * 100;
    if (value > 0 && value < 0.1) return "<0.1%";
    return `${value < 10 ? value.toFixed(1) : value.toFixed(0)}%`;
  }

  // A time on the ruler, with as many digits as neighbouring ticks need to differ.
  function tick(value, step) {
    if (Math.abs(value) < step / 2) return "0";
    const [size, unit] = UNITS.find(([s]) => step >= s || s === 1) || UNITS[3];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    return `${(value / size).toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: digits })} ${unit}`;
  }

  const PYTHON = /^(.*?)([^/\\]+)\((\d+)\): (.+)$/;

  // The part of a name that tells events apart, for labels that have little room.
  function short(name) {
    const frame = PYTHON.exec(name);
    if (frame) return `${frame[4]}  ${frame[2]}:${frame[3]}`;
    let text = name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "").replace("autograd::engine::evaluate_function: ", "");
    const angle = text.indexOf("<");
    const head = angle > 0 ? text.slice(0, angle) : text;
    const paren = head.search(/(?<=\w)\(/); // "Memcpy HtoD (Pageable -> Device)" keeps its words
    text = paren > 0 ? head.slice(0, paren) : head;
    if (text.startsWith("at::native::")) text = text.slice(text.lastIndexOf("::") + 2);
    return angle > 0 && paren < 0 ? `${text}<…>` : text;
  }

  // As records/words.py: a capital for a first word that is plain English, none for names of code.
  function sentence(text) {
    const first = /^([a-z]+)(?:'s)?(?=[ ,;]|: |\. )/.exec(text);
    if (!first || NAMES.has(first[1])) return text;
    return text[0].toUpperCase() + text.slice(1);
  }

  return { ns, bytes, count, rate, percent, tick, short, sentence };
})();
