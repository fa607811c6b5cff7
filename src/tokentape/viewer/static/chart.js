// SVG charts over weight versions: lines with a band, and one crosshair across all charts.

import { h, real } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 90;

function s(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The place of a value between two others, from 0 to 1. The halves of two numbers have a finite difference. */
const share = (value, least, most) => (value / 2 - least / 2) / (most / 2 - least / 2 || 1);

const known = (value) => value !== null && Number.isFinite(value);

/**
 * A card with lines that have a point per version, and a gap for a version without a value.
 * @param {string} title
 * @param {{name?: string, values: (number | null)[], low?: (number | null)[], high?: (number | null)[]}[]} lines
 * @param {{versions: string[], text?: (value: number) => string, about: string, none: string}} options
 */
export function chart(title, lines, { versions, text = real, about, none }) {
  const every = lines.flatMap(({ values, low = [], high = [] }) => [...values, ...low, ...high]).filter(known);
  const caption = h("p", { class: "dim about" }, every.length ? about : none);
  if (!every.length) {
    const element = h("section", { class: "card chart" }, h("h2", {}, title), h("p", { class: "figure none" }, "not recorded"), caption);
    return { element, show: () => {} };
  }
  const least = Math.min(0, ...every);
  const most = Math.max(...every) || 1;
  const n = lines[0].values.length;
  const x = (at) => (n > 1 ? (at / (n - 1)) * (WIDTH - 8) + 4 : WIDTH / 2);
  const y = (value) => HEIGHT - 4 - share(value, least, most) * (HEIGHT - 8);
  const image = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title} over ${n} versions of the weights, from ${text(least)} to ${text(most)}` });
  image.append(s("line", { class: "zero", x1: 0, x2: WIDTH, y1: y(0), y2: y(0) }));
  lines.forEach(({ values, low, high }, order) => {
    for (const run of runs(values)) {
      if (low) image.append(s("polygon", { class: `band c${order}`, points: [...run.map((at) => `${x(at)},${y(high[at])}`), ...run.toReversed().map((at) => `${x(at)},${y(low[at])}`)].join(" ") }));
      // Draw a single version as a line: short among other versions, across the chart if it is the only version.
      const half = n > 1 ? 2 : WIDTH / 2;
      const points = run.length > 1 ? run.map((at) => `${x(at)},${y(values[at])}`) : [-half, half].map((by) => `${x(run[0]) + by},${y(values[run[0]])}`);
      image.append(s("polyline", { class: `c${order}`, points: points.join(" ") }));
    }
  });
  const hair = s("line", { class: "hair", y1: 0, y2: HEIGHT });
  image.append(hair);
  const figure = h("p", { class: "figure" });
  const element = h(
    "section",
    { class: "card chart" },
    h("h2", {}, title),
    figure,
    h(
      "div",
      { class: "plot" },
      image,
      h("span", { class: "most dim" }, text(most)),
      h("span", { class: "least dim" }, text(least)),
      h("div", { class: "ends dim" }, ...[...new Set([versions[0], versions.at(-1)])].map((version, order) => h("span", {}, order ? "" : "weights ", h("bdi", {}, version)))),
    ),
    caption,
  );
  const show = (at, pinned) => {
    hair.setAttribute("x1", x(at));
    hair.setAttribute("x2", x(at));
    hair.setAttribute("visibility", pinned ? "visible" : "hidden");
    figure.replaceChildren(
      ...lines.map(({ name, values }, order) =>
        h("span", { class: `of c${order}${known(values[at]) ? "" : " none"}` }, known(values[at]) ? text(values[at]) : "not recorded", name && h("small", {}, h("bdi", {}, ` ${name}`))),
      ),
      h("small", { class: "at" }, "at weights ", h("bdi", {}, versions[at])),
    );
  };
  return { element, show };
}

/** Runs of points that have a value. */
function runs(values) {
  const found = [];
  values.forEach((value, at) => {
    if (!known(value)) return;
    if (at && known(values[at - 1])) found.at(-1).push(at);
    else found.push([at]);
  });
  return found;
}

/** A group's rewards as dots on a line from the lowest to the highest reward of all groups. */
export function strip(values, least, most) {
  const image = s("svg", { class: "strip", viewBox: "0 0 104 12", "aria-hidden": "true" });
  image.append(s("line", { class: "zero", x1: 3, x2: 101, y1: 6, y2: 6 }));
  for (const value of values) image.append(s("circle", { cx: 4 + 96 * share(value, least, most), cy: 6, r: 2.6 }));
  return image;
}
