// Canvas colours, read from the style sheet so that bar, timeline and tables always agree.

const Palette = (() => {
  const KINDS = [...WORDS.classes, ...WORDS.causes];
  const FIRST_CAUSE = WORDS.classes.length;
  const VARIANTS = 3; // slightly different shades by name tell neighbours apart
  const LEVELS = 4; // how full a pixel is where events are narrower than one
  let current = null;

  function parse(color) {
    const hex = color.trim().replace("#", "");
    return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }

  const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
  const css = (rgb, alpha = 1) => `rgba(${rgb.join(",")},${alpha})`;
  const luminance = ([r, g, b]) => (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;

  function variants(rgb, back) {
    return [rgb, mix(rgb, back, 0.09), mix(rgb, back, 0.18)];
  }

  function read() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`);
    const back = parse(get("panel"));
    const fills = [];
    const inks = [];
    const solid = [];
    KINDS.forEach((kind) => {
      const rgb = parse(get(`c-${kind}`));
      solid.push(css(rgb));
      variants(rgb, back).forEach((shade) => {
        for (let level = 1; level <= LEVELS; level++) fills.push(css(mix(back, shade, 0.35 + (0.65 * level) / LEVELS)));
      });
      inks.push(luminance(rgb) > 0.5 ? "#14181f" : "#ffffff");
    });
    return {
      fills,
      inks,
      solid,
      back: css(back),
      text: get("text").trim(),
      muted: get("muted").trim(),
      line: get("line").trim(),
      strong: get("line-strong").trim(),
      accent: get("accent").trim(),
      dim: css(back, 0.64),
      shade: KINDS.map((kind) => css(parse(get(`c-${kind}`)), 0.16)),
      faint: KINDS.map((kind) => css(parse(get(`c-${kind}`)), 0.5)),
      hatch: css(back, 0.45),
      font: get("font").trim(),
    };
  }

  const get = () => (current = current || read());
  const forget = () => (current = null);
  const fill = (kind, variant, level) => (kind * VARIANTS + variant) * LEVELS + level;

  return { get, forget, fill, KINDS, FIRST_CAUSE, VARIANTS, LEVELS };
})();
