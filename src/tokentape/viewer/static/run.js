// A run: its figures over weight versions, and its groups, updated while it runs.

import { link } from "./address.js";
import { getJson } from "./api.js";
import { chart, strip } from "./chart.js";
import { count, counted, fill, h, real, when } from "./dom.js";
import { bindKeys } from "./keys.js";
import { poll } from "./polling.js";

const EVERY = 4000;
/** How many of the versions with the best reward are named. */
const BEST = 4;
/** What the table's short headings mean. */
const MEANINGS = {
  length: "sampled tokens per session",
  mean: "mean reward of the sessions that these weights began",
  sd: "standard deviation of these rewards",
  ratio: "mean of exp(trainer's logprob - recorded logprob)",
  k3: "estimate of the KL divergence between trainer and sampler, per token",
  ess: "effective sample size, as a share of the tokens",
};

const FILTERS = ["search", "metadata", "group_key", "group_value", "verdict", "drift", "role", "weights", "fork", "reward_min", "reward_max", "since", "until"];

const percent = (share) => (share === null ? "not recorded" : `${real(100 * share)} %`);
const or = (value, text = real) => (value === null ? "not recorded" : text(value));

export async function showRun(view) {
  await new RunPage(view).open();
}

class RunPage {
  constructor(view) {
    this.view = view;
    // A file contains only the run of all its sessions.
    const filters = view.about.exported ? [] : FILTERS;
    this.filters = Object.fromEntries(filters.map((name) => [name, view.query.get(name) ?? ""]).filter(([, value]) => value));
    this.group = view.query.get("group") ?? "";
    this.sorted = ["", 1];
    this.onlyEqual = false;
    this.at = null;
    document.title = "Run · Tokentape";
  }

  async open() {
    this.parts = { head: h("div", { class: "listhead" }, h("h1", {}, "Run"), h("p", { class: "dim" }, "Measuring sessions…")), charts: h("div", { class: "cards" }), groups: h("section", { class: "groups" }), table: h("details", { class: "menu figures" }) };
    const { head, charts, groups, table } = this.parts;
    fill(this.view.main, h("div", { class: "overview run", tabindex: "0", role: "region", "aria-label": "Run" }, head, charts, groups, table));
    charts.addEventListener("pointermove", (event) => this.#pointed(event));
    charts.addEventListener("pointerleave", () => this.#point(null));
    charts.addEventListener("click", (event) => event.target.closest("svg") && this.#toSessions());
    bindKeys([
      {
        title: "Run",
        keys: [
          [["ArrowRight", "l"], "next weights", () => this.#step(1)],
          [["ArrowLeft", "h"], "weights before", () => this.#step(-1)],
          [["Enter"], "sessions with turns of these weights", () => this.#toSessions()],
          [["Escape"], "the newest weights", () => this.#point(null)],
        ],
      },
    ]);
    poll(this.view, await this.#look(), () => this.#look());
  }

  /** Fetch the current figures. Return the milliseconds until the next fetch, or null if they can't change. */
  async #look() {
    const begun = performance.now();
    const { group } = this;
    const found = await getJson("run", { ...this.filters, group }, this.view.signal);
    if (group === this.group && JSON.stringify(found) !== JSON.stringify(this.found)) {
      this.found = found;
      this.#draw();
    }
    if (found.measured < found.of) return 100;
    return this.view.about.grows ? Math.max(EVERY, 10 * (performance.now() - begun)) : null;
  }

  #draw() {
    const { found } = this;
    this.#drawHead(found);
    this.#drawCharts(found.weights, found.cache);
    this.#drawGroups(found);
    this.#drawTable(found.weights);
    this.#point(this.at);
  }

  #drawHead({ measured, of, most, weights, unreadable }) {
    const all = `${of === most ? "the newest " : ""}${counted(of, "session")}`;
    const progress = measured < of ? `Measuring ${count(measured)} of ${all}, newest first; earlier weights are still missing` : all;
    const { group_key: key, group_value: of_key = "", ...others } = this.filters;
    const filters = Object.entries(others).flatMap(([name, value]) => value.split("\n").map((one) => (name === "metadata" ? one : `${name.replace("_", " ")} ${one}`)));
    if (key) filters.push(`${key} = ${of_key}`);
    this.latest = h("span", { class: "dim", "aria-live": "polite" });
    fill(
      this.parts.head,
      h("h1", {}, "Run"),
      h("p", { class: "dim" }, `${progress} · ${counted(weights.length, "version")} of the weights`),
      unreadable > 0 && h("span", { class: "badge bad", title: "excluded from all figures; `tokentape verify` shows why" }, `${count(unreadable)} unreadable`),
      ...filters.map((text) => h("span", { class: "badge" }, h("bdi", {}, text))),
      filters.length > 0 && h("a", { href: "#/run" }, "all sessions"),
      !this.view.about.exported && h("a", { href: `#/sessions?${new URLSearchParams(this.filters)}` }, "Sessions of this run"),
      h("span", { class: "space" }),
      this.latest,
    );
  }

  #drawCharts(weights, cache) {
    const of = (name) => weights.map((one) => one[name]);
    const rate = (name, cause) => weights.map((one) => (one[name] === null || !one.turns ? null : (100 * (cause ? (one[name][cause] ?? 0) : total(one[name]))) / one.turns));
    const causes = [...new Set(weights.flatMap((one) => Object.keys(one.forks)))].sort();
    // Turns by the reason why their logprobs can't be compared with a trainer's.
    const unlike = new Map();
    for (const one of weights) for (const [why, turns] of Object.entries(one.not_comparable)) unlike.set(why, (unlike.get(why) ?? 0) + turns);
    const notComparable = [...unlike].map(([why, turns]) => `Not comparable: the logprobs of ${counted(turns, "turn")} are ${why}.`).join(" ");
    const mean = of("mean");
    // Limit the band to the lowest and the highest reward.
    const spread = (by) => weights.map((one) => (one.mean === null ? null : Math.min(one.most, Math.max(one.least, one.mean + by * one.sd))));
    const versions = of("weights");
    const figure = (title, lines, options) => chart(title, lines, { versions, ...options });
    this.charts = [
      figure("Reward", [{ values: mean, low: spread(-1), high: spread(1) }], { about: h("span", {}, "Mean of the sessions that these weights began, and one standard deviation.", best(weights)), none: "No session has a reward." }),
      figure("Sampled tokens per session", [{ values: of("length") }], { about: "Mean of the sessions that these weights began.", none: "No turn is recorded." }),
      figure("Drift", [{ values: of("drift") }], { text: percent, about: "Sampled tokens that tokenizing their text again would change.", none: "Measuring drift needs a tokenizer." }),
      figure("Importance ratio", [{ name: "mean", values: of("ratio") }, { name: "effective sample size", values: of("ess") }], { about: `exp(trainer's logprob - recorded logprob) per token, and the effective sample size. ${notComparable}`, none: notComparable || "Annotate turns with a column named `trainer_logprobs`." }),
      figure("Forks per 100 turns", causes.length ? causes.map((cause) => ({ name: cause, values: rate("forks", cause) })) : [{ values: rate("forks") }], { about: causes.length ? "By cause." : "None in this run.", none: "No turn is recorded." }),
      figure("Truncated turns", [{ values: of("truncated") }], { text: percent, about: "Of the turns that were not aborted, those that ended by their token budget.", none: "Why turns ended is not recorded." }),
      figure("Aborts and resumes per 100 turns", [{ name: "aborted", values: rate("aborts") }, { name: "resumed", values: rate("resumes") }], { about: "Aborted turns, and calls that continued an aborted turn.", none: "Files of trajectories do not contain aborted turns." }),
      figure("Sampled tokens per second", [{ values: of("tokens_per_second") }], { about: "All sessions together, since the first turn with these weights could begin.", none: "Turns have no timestamps." }),
    ];
    fill(this.parts.charts, ...this.charts.map((one) => one.element), cacheCard(cache));
  }

  #drawGroups({ group, groups, groups_total: total, keys }) {
    const rewards = groups.flatMap((one) => one.rewards);
    const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
    const select = h(
      "select",
      { id: "group", onchange: (event) => this.#setGroup(event.target.value) },
      ...(group in keys ? [] : [h("option", { value: group, selected: true }, group || "choose a key")]),
      ...Object.entries(keys).map(([key, values]) => h("option", { value: key, selected: key === group }, `${key} (${counted(values, "value")})`)),
    );
    const [by, order] = this.sorted;
    const some = this.onlyEqual ? groups.filter(collapsed) : groups;
    const shown = by ? some.toSorted((a, b) => order * ((a[by] ?? Infinity) - (b[by] ?? Infinity))) : some;
    const heads = [["", "Group"], ["sessions", "Sessions"], ["mean", "Mean reward"], ["sd", "Spread"], ["", "Rewards"], ["length", "Sampled per session"], ["drift", "Drift"], ["", "Weights"]];
    const head = ([key, text]) =>
      h("th", { scope: "col", "aria-sort": key && key === by ? (order > 0 ? "ascending" : "descending") : null }, key ? h("button", { class: "sort", onclick: () => this.#sort(key) }, `${text}${key === by ? (order > 0 ? " ↑" : " ↓") : ""}`) : text);
    const without = groups.filter(collapsed).length;
    fill(
      this.parts.groups,
      h(
        "div",
        { class: "listhead" },
        h("h2", {}, "Groups"),
        h("label", { for: "group", class: "dim" }, "by"),
        select,
        !group && h("span", { class: "dim" }, Object.keys(keys).length ? "Choose the metadata key whose value the sessions of one prompt share." : "No session has metadata to group by."),
        group && h("span", { class: "dim" }, `${counted(total, "group")}${total > groups.length ? `, the ${count(groups.length)} newest` : ""}`),
        without > 0 && h("button", { class: "quiet", "aria-pressed": String(this.onlyEqual), title: "Show only these groups", onclick: () => this.#toggleEqual() }, h("span", { class: "badge warn" }, `${counted(without, "group")} with equal rewards (no advantage)`)),
      ),
      groups.length > 0 &&
        h(
          "div",
          { class: "tablebox", tabindex: "0", role: "region", "aria-label": "Groups" },
          h("table", {}, h("thead", {}, h("tr", {}, ...heads.map(head))), h("tbody", {}, ...shown.map((one) => this.#groupLine(one, least, most)))),
        ),
    );
  }

  #groupLine(one, least, most) {
    const query = new URLSearchParams({ ...this.filters, group_key: this.found.group, group_value: one.value });
    const { text, exported } = this.view.about;
    const [best, worst] = one.best_and_worst;
    const number = (...content) => h("td", { class: "number" }, ...content);
    return h(
      "tr",
      {},
      h("td", { class: "key" }, this.#link(`#/sessions?${query}`, h("bdi", {}, one.value.length > 80 ? `${one.value.slice(0, 80)}…` : one.value || "(empty)"))),
      number(count(one.sessions), one.rewarded < one.sessions && h("span", { class: "dim" }, ` (${one.rewarded} rewarded)`)),
      number(or(one.mean)),
      number(collapsed(one) ? h("span", { class: "badge warn" }, "0") : or(one.sd)),
      h("td", { class: "rewards" }, strip(one.rewards, least, most), text && !exported && one.least < one.most && h("a", { href: link({ id: best, side: `session-${worst}`, mode: "beside", list: String(query) }) }, "best ⇄ worst")),
      number(or(one.length)),
      number(percent(one.drift)),
      h("td", { class: "weights" }, h("bdi", {}, [...new Set(one.weights)].join(" … ") || "–")),
    );
  }

  #drawTable(weights) {
    const columns = [["sessions", count], ["rewarded", count], ["mean", real], ["sd", real], ["length", real], ["turns", count], ["sampled_tokens", count], ["drift", percent], ["ratio", real], ["k3", real], ["ess", percent], ["forks", total], ["truncated", percent], ["aborts", total], ["resumes", total], ["tokens_per_second", real], ["first_at", when]];
    const open = this.parts.table.open;
    fill(
      this.parts.table,
      h("summary", {}, "All figures as a table"),
      h("p", { class: "dim about" }, Object.entries(MEANINGS).map(([name, meaning]) => `${name}: ${meaning}`).join("; "), "."),
      h(
        "div",
        { class: "tablebox", tabindex: "0", role: "region", "aria-label": "Figures" },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "weights"), ...columns.map(([name]) => h("th", { scope: "col", title: MEANINGS[name] }, name.replaceAll("_", " "))))),
          h("tbody", {}, ...weights.toReversed().map((one) => h("tr", {}, h("td", { class: "weights" }, this.#link(this.#sessionsOf(one), h("bdi", {}, one.weights))), ...columns.map(([name, text]) => h("td", { class: "number" }, or(one[name], text)))))),
        ),
      ),
    );
    this.parts.table.open = open;
  }

  #sessionsOf({ weights }) {
    return `#/sessions?${new URLSearchParams({ ...this.filters, weights })}`;
  }

  /** A link to a filtered list, which exported files lack. */
  #link(href, text) {
    return this.view.about.exported ? text : h("a", { href }, text);
  }

  #toSessions() {
    const { weights } = this.found;
    // An exported list has no filters.
    if (weights.length && !this.view.about.exported) location.hash = this.#sessionsOf(weights[this.at ?? weights.length - 1]);
  }

  #sort(key) {
    this.sorted = [key, this.sorted[0] === key ? -this.sorted[1] : 1];
    this.#drawGroups(this.found);
  }

  #toggleEqual() {
    this.onlyEqual = !this.onlyEqual;
    this.#drawGroups(this.found);
    this.parts.groups.querySelector("[aria-pressed]")?.focus();
  }

  #setGroup(key) {
    this.group = key;
    this.onlyEqual = false;
    history.replaceState(null, "", `#/run?${new URLSearchParams({ ...this.filters, group: key })}`);
    this.#look().catch(this.view.failed);
  }

  #step(by) {
    const last = this.found.weights.length - 1;
    this.#point(Math.max(0, Math.min(last, (this.at ?? last + (by < 0 ? 1 : 0)) + by)));
  }

  #pointed(event) {
    const image = event.target.closest("svg");
    if (!image) return;
    const { left, width } = image.getBoundingClientRect();
    const last = this.found.weights.length - 1;
    this.#point(Math.max(0, Math.min(last, Math.round(((event.clientX - left) / width) * last))));
  }

  /** Show the figures of one version in all charts; null for the newest. */
  #point(at) {
    const { weights } = this.found;
    if (!weights.length) return;
    this.at = at === null ? null : Math.min(at, weights.length - 1);
    const here = this.at ?? weights.length - 1;
    for (const one of this.charts) one.show(here, this.at !== null);
    const { weights: version, first_at: first, turns } = weights[here];
    fill(this.latest, h("bdi", {}, `weights ${version}`), ` · ${counted(turns, "turn")}${first ? ` · from ${when(first)}` : ""}`);
  }
}

/** The highest mean reward, and the versions that reach it. */
function best(weights) {
  const most = Math.max(...weights.map((one) => one.mean ?? -Infinity));
  const having = weights.filter((one) => one.mean === most).map((one) => h("bdi", {}, one.weights));
  if (having.length === weights.length) return null;
  const named = having.slice(0, BEST).flatMap((one, n) => (n ? [", ", one] : [one]));
  return h("span", {}, ` Best: ${real(most)} at weights `, ...named, having.length > BEST && ` and ${count(having.length - BEST)} more`, ".");
}

/** Whether all rewards of a group are equal. */
const collapsed = (one) => one.rewarded > 1 && one.least === one.most;

const total = (counts) => Object.values(counts).reduce((sum, value) => sum + value, 0);

/** Cache hits, which the gateway counts in total and not per turn. */
function cacheCard(cache) {
  const share = cache && cache.prompt_tokens > 0 && cache.cached_tokens > 0 ? cache.cached_tokens / cache.prompt_tokens : null;
  return h(
    "section",
    { class: "card chart" },
    h("h2", {}, "Cache hits"),
    h("p", { class: share === null ? "figure none" : "figure" }, percent(share)),
    h("p", { class: "dim about" }, share === null ? "Turns do not record cache hits. A running gateway counts those that its engine reports." : `Of ${count(cache.prompt_tokens)} prompt tokens since this gateway started, whatever the weights.`),
  );
}
