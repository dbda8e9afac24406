// Canvas colours, read from the style sheet so that bar, timeline and tables always agree.

import { SHARED } from "./shared.js";

export const KINDS = [...SHARED.classes, ...SHARED.causes];
export const FIRST_CAUSE = SHARED.classes.length;
export const VARIANTS = 3; // slightly different shades by name set neighbours apart
export const LEVELS = 4; // how full a pixel is where events are narrower than one
export const HEATS = 64; // shades of the heat map
export const DIFFS = 16; // shades of more, and of less

let current = /** @type {ReturnType<typeof readColors> | null} */ (null);

/** Red, green and blue of #rrggbb. @param {string} color */
const parse = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));

/** @param {Rgb} a @param {Rgb} b @param {number} share */
const mix = (a, b, share) => a.map((part, i) => Math.round(part + (b[i] - part) * share));

/** @param {Rgb} rgb */
const css = (rgb, alpha = 1) => `rgba(${rgb.join(",")},${alpha})`;

/** What can be read on a colour. @param {Rgb} rgb */
const inkOn = ([r, g, b]) => ((0.2126 * r + 0.7152 * g + 0.0722 * b) / 255 > 0.5 ? "#14181f" : "#ffffff");

/** From --heat-0 over --heat-1 to --heat-2. @param {(name: string) => string} get */
function heats(get) {
  const [cold, warm, hot] = [0, 1, 2].map((i) => parse(get(`heat-${i}`)));
  return Array.from({ length: HEATS }, (_, i) => {
    const at = (2 * i) / (HEATS - 1);
    const rgb = at < 1 ? mix(cold, warm, at) : mix(warm, hot, at - 1);
    return { color: css(rgb), ink: inkOn(rgb) };
  });
}

/** Of a difference: less (0) over the same (DIFFS) to more (2 * DIFFS). @param {(name: string) => string} get @param {Rgb} back */
function differences(get, back) {
  const [less, same, more] = ["less", "same", "more"].map((name) => parse(get(`d-${name}`)));
  return Array.from({ length: 2 * DIFFS + 1 }, (_, i) => {
    const rgb = mix(same, i < DIFFS ? less : more, Math.abs(i - DIFFS) / DIFFS);
    return { fill: css(rgb), ink: inkOn(rgb), dim: css(mix(back, rgb, 0.4)) };
  });
}

/** @param {Rgb} rgb @param {Rgb} back */
function collectiveColors(rgb, back) {
  return {
    solid: css(rgb), pale: css(mix(back, rgb, 0.28)), band: css(rgb, 0.15), line: css(rgb, 0.55),
    ink: inkOn(rgb),
  };
}

/** The fills of a kind: each variant at each level. @param {Rgb} rgb @param {Rgb} back */
function fillsOf(rgb, back) {
  return [0, 0.09, 0.18].map((paler) => mix(rgb, back, paler)).flatMap((shade) =>
    Array.from({ length: LEVELS }, (_, i) => css(mix(back, shade, 0.35 + (0.65 * (i + 1)) / LEVELS))));
}

/** Of steps that are no stalls. @param {Rgb} rgb @param {Rgb} back */
const calmColors = (rgb, back) => ({ line: css(rgb), faint: css(rgb, 0.6), band: css(mix(back, rgb, 0.22)) });

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const get = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  const back = parse(get("panel"));
  const kinds = KINDS.map((kind) => parse(get(`c-${kind}`)));
  return {
    fills: kinds.flatMap((rgb) => fillsOf(rgb, back)),
    inks: kinds.map(inkOn),
    solid: kinds.map((rgb) => css(rgb)),
    back: css(back),
    text: get("text"), muted: get("muted"), accent: get("accent"), high: get("high"), font: get("font"),
    line: get("line"), strong: get("line-strong"),
    dim: css(back, 0.64),
    shade: kinds.map((rgb) => css(rgb, 0.16)),
    faint: kinds.map((rgb) => css(rgb, 0.5)),
    hatch: css(back, 0.45),
    heat: heats(get),
    diff: differences(get, back),
    stepBand: css(parse(get("c-compute")), 0.2),
    inputBand: css(parse(get("c-data_loading"))),
    stalls: SHARED.stalls.map((cause) => parse(get(`c-stall_${cause}`))).map((rgb) => ({ solid: css(rgb), stem: css(rgb, 0.5) })),
    calm: calmColors(parse(get("c-compute")), back),
    window: css(parse(get("c-profiler")), 0.28),
    change: css(parse(get("high")), 0.13),
    grey: css(parse(get("muted")), 0.1),
    collectives: Object.fromEntries(SHARED.collectives.map((kind) => [kind, collectiveColors(parse(get(`k-${kind}`)), back)])),
  };
}

export const getColors = () => (current ??= readColors());
export const forgetColors = () => { current = null; };

/** Place among the fills. @param {number} kind @param {number} variant @param {number} level */
export const fillIndex = (kind, variant, level) => (kind * VARIANTS + variant) * LEVELS + level;
