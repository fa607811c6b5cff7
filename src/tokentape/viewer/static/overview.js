// What a gateway is doing: the numbers of /metrics, with counters as rates.

import { getJson } from "./api.js";
import { count, counted, fill, h, real } from "./dom.js";
import { bindKeys } from "./keys.js";
import { poll } from "./polling.js";
import { CAUSES } from "./tree.js";

const EVERY = 2000;
/** The number of points in a curve: five minutes. */
const KEPT = 150;
const SVG = "http://www.w3.org/2000/svg";

export async function showOverview(view) {
  document.title = "Overview · Tokentape";
  bindKeys([]);
  if (!view.about.overview) {
    fill(view.main, h("div", { class: "card" }, h("h1", {}, "Overview"), h("p", {}, "The overview needs a running gateway, and a key that may see its metrics.")));
    return;
  }
  const points = [];
  const place = h("div", { class: "overview" });
  fill(view.main, place);
  const look = async () => {
    try {
      points.push({ at: performance.now() / 1000, values: await getJson("overview", {}, view.signal) });
    } catch (error) {
      place.querySelector(".error")?.remove();
      place.prepend(h("p", { class: "error", role: "alert" }, error.message));
      throw error;
    }
    if (points.length > KEPT) points.shift();
    draw(place, points);
    return EVERY;
  };
  poll(view, 0, look);
}

/** The sum of a metric over the wanted labels. */
function total(values, name, wanted = () => true) {
  return (values[`tokentape_${name}`] ?? []).filter((one) => wanted(one.labels)).reduce((sum, one) => sum + one.value, 0);
}

/** A metric's values by one label, largest first. */
function by(values, name, label) {
  const sums = new Map();
  for (const one of values[`tokentape_${name}`] ?? []) sums.set(one.labels[label], (sums.get(one.labels[label]) ?? 0) + one.value);
  return [...sums].filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
}

/** Growth per second between neighbouring points. */
function rates(points, read) {
  return points.slice(1).map((point, n) => Math.max(0, (read(point.values) - read(points[n].values)) / (point.at - points[n].at)));
}

/** Growth per second over the last ten seconds. */
function recent(points, read) {
  const last = points.at(-1);
  const from = points.find((point) => point.at > last.at - 10.5) ?? points[0];
  return last === from ? null : Math.max(0, (read(last.values) - read(from.values)) / (last.at - from.at));
}

function draw(place, points) {
  const now = points.at(-1).values;
  const committed = (values) => total(values, "turns_total", (labels) => labels.outcome === "committed");
  const sampled = (values) => total(values, "sampled_tokens_total");
  const failed = (values) => total(values, "call_failures_total");
  const aborted = by({ x: 0, ...now, tokentape_aborts: (now.tokentape_turns_total ?? []).filter((one) => one.labels.outcome === "aborted") }, "aborts", "cause");
  const build = now.tokentape_build_info?.[0]?.labels ?? {};
  const stages = by(now, "stage_seconds_sum", "stage").map(([stage, seconds]) => [
    stage,
    (1000 * seconds) / Math.max(1, total(now, "stage_seconds_count", (labels) => labels.stage === stage)),
  ]);
  const measured = total(now, "drift_completions_total");
  const drifted = total(now, "drift_completions_total", (labels) => labels.outcome === "drifted");
  const changed = total(now, "drift_tokens_total", (labels) => labels.outcome === "changed");
  const drift = measured
    ? `${count(drifted)} of ${count(measured)} completions (${real((100 * drifted) / measured)} %) come back from text with other ids: ${counted(changed, "token")}.`
    : "No completion was measured.";
  fill(
    place,
    h("h1", {}, "Overview"),
    h("p", { class: "dim" }, [build.model && `model ${build.model}`, build.engine && `${build.engine} ${build.engine_version}`, `Tokentape ${build.version ?? ""}`].filter(Boolean).join(" · ")),
    h(
      "div",
      { class: "cards" },
      figure("Turns per second", recent(points, committed), rates(points, committed), `${count(committed(now))} recorded`),
      figure("Sampled tokens per second", recent(points, sampled), rates(points, sampled), `${count(sampled(now))} in all`),
      figure("Failures per second", recent(points, failed), rates(points, failed), `${count(failed(now))} in all`),
      plain("Under way", [
        ["calls", total(now, "calls_under_way")],
        ["requests", total(now, "http_requests_under_way")],
        ["sessions in memory", total(now, "open_sessions")],
      ]),
      plain("Store", [["can record", total(now, "store_healthy") ? "yes" : "no, until a restart"], ["replays of recorded answers", total(now, "replays_total")]]),
      bars("Verdicts", by(now, "verdicts_total", "verdict"), "No turn is recorded yet."),
      bars("Forks by cause", by(now, "forks_total", "cause"), "No fork.", CAUSES),
      bars("Drift by artifact", by(now, "drift_stretches_total", "artifact"), drift, {}, drift),
      bars("Failed calls by code", by(now, "call_failures_total", "code"), "No call failed."),
      bars("Aborted turns by cause", aborted, "No turn was aborted."),
      bars("Milliseconds per call and stage", stages, "No call yet."),
    ),
  );
}

function card(title, ...content) {
  return h("section", { class: "card" }, h("h2", {}, title), ...content);
}

function figure(title, value, series, below) {
  return card(title, h("p", { class: "figure" }, value === null ? "…" : real(Math.round(value * 100) / 100)), spark(series), h("p", { class: "dim" }, below));
}

function plain(title, lines) {
  return card(title, h("dl", { class: "facts" }, ...lines.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "number" ? count(value) : value)])));
}

function bars(title, lines, none, meanings = {}, above = null) {
  if (!lines.length) return card(title, h("p", { class: "dim" }, none));
  const most = Math.max(...lines.map(([, value]) => value));
  return card(
    title,
    above && h("p", { class: "dim" }, above),
    h(
      "ul",
      { class: "bars" },
      ...lines.map(([name, value]) => {
        const bar = h("span", { class: "bar", "aria-hidden": "true" });
        bar.style.setProperty("width", `${(100 * value) / most}%`);
        return h("li", { title: meanings[name] ?? null }, h("span", { class: "barname" }, name), h("span", { class: "barvalue" }, Number.isInteger(value) ? count(value) : real(value)), bar);
      }),
    ),
  );
}

function spark(series) {
  const image = document.createElementNS(SVG, "svg");
  image.setAttribute("viewBox", `0 0 ${KEPT} 30`);
  image.setAttribute("preserveAspectRatio", "none");
  image.setAttribute("class", "spark");
  image.setAttribute("aria-hidden", "true");
  const most = Math.max(...series, 1e-9);
  const from = KEPT - series.length;
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", series.map((value, n) => `${from + n},${29 - (28 * value) / most}`).join(" "));
  image.append(line);
  return image;
}
