// Canvas colours, read from the style sheet so that bar, timeline and tables always agree.

const Palette = (() => {
  const KINDS = [...WORDS.classes, ...WORDS.causes];
  const FIRST_CAUSE = WORDS.classes.length;
  const VARIANTS = 3; // slightly different shades by name tell neighbours apart
  const LEVELS = 4; // how full a pixel is where events are narrower than one
  const HEATS = 64; // shades of the heat map
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

  // From --heat-0 over --heat-1 to --heat-2, each shade with an ink that can be read on it.
  function heats(get) {
    const stops = [0, 1, 2].map((i) => parse(get(`heat-${i}`)));
    return Array.from({ length: HEATS }, (_, i) => {
      const at = (2 * i) / (HEATS - 1);
      const rgb = at < 1 ? mix(stops[0], stops[1], at) : mix(stops[1], stops[2], at - 1);
      return { color: css(rgb), ink: luminance(rgb) > 0.5 ? "#14181f" : "#ffffff" };
    });
  }

  function collective(rgb, back) {
    return {
      solid: css(rgb), pale: css(mix(back, rgb, 0.28)), band: css(rgb, 0.15), line: css(rgb, 0.55),
      ink: luminance(rgb) > 0.5 ? "#14181f" : "#ffffff",
    };
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
      high: get("high").trim(),
      heat: heats(get),
      stepBand: css(parse(get("c-compute")), 0.2),
      inputBand: css(parse(get("c-data_loading"))),
      collectives: Object.fromEntries(WORDS.collectives.map((kind) => [kind, collective(parse(get(`k-${kind}`)), back)])),
    };
  }

  const get = () => (current = current || read());
  const forget = () => (current = null);
  const fill = (kind, variant, level) => (kind * VARIANTS + variant) * LEVELS + level;

  return { get, forget, fill, KINDS, FIRST_CAUSE, VARIANTS, LEVELS, HEATS };
})();
