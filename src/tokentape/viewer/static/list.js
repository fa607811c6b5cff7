// The list of sessions, with search, filters, sorting and pages.

import { link, otherOf } from "./address.js";
import { Refused, getJson } from "./api.js";
import { count, counted, fill, h, pairs, real, say, when } from "./dom.js";
import { FILTERS, filterForm } from "./filters.js";
import { bindKeys } from "./keys.js";
import { poll } from "./polling.js";
import { verdictBadge } from "./tree.js";

const PAGE = 100;
const REFRESH = 4000;
/** The total tokens of sessions that are measured without a request; loading the list again adds as many. */
const MEASURED = 100000;
const MORE = 20000;
const AT_ONCE = 10;
/** How many metadata keys are columns by default. */
const KEYS = 4;

/** Name, heading, and the initial sort order; null if the server can't sort by the column. */
const COLUMNS = [
  ["session", "Session", "asc"],
  ["created", "Begun", "desc"],
  ["verdict", "Verdict", null],
  ["drift", "Drift", "desc"],
  ["reward", "Reward", "desc"],
  ["role", "Role", null],
  ["weights", "Weights", null],
  ["turns", "Turns", "desc"],
  ["tokens", "Tokens", "desc"],
  ["sampled", "Sampled", "desc"],
  ["forks", "Forks", "desc"],
  ["aborted", "Aborted", "desc"],
];

const MEANINGS = {
  verdict: "what is known about the branches: exact, forked and why, closed by the gateway, and reservations",
  role: "by lineage: main, subagent or side call",
  weights: "weight versions that sampled the session's turns",
  drift: "sampled tokens that tokenizing their text again would change, as `tokentape drift` counts them",
};

/** Ids in the order of the last list, for going from session to session. */
let listed = [];
/** The query of the last list. */
let listedBy = "";

function listedAs({ sessions }, query) {
  listed = sessions.map((one) => one.session_id);
  listedBy = query;
}

/** The server's query for a list's URL, without the page. */
function asked({ page, keys, compare, from, to, ...rest }) {
  // Days begin and end at midnight in the reader's time zone.
  const day = (text, more) => text && new Date(`${text}T00:00`).setDate(new Date(`${text}T00:00`).getDate() + more) / 1000;
  return { ...rest, since: day(from, 0), until: day(to, 1) };
}

/**
 * Go to the session `by` places further in the list that `query` filters and sorts. Return whether it exists. If `side`
 * is from a different session, it stays next to the new session, and its session is skipped.
 */
export async function toNeighbour(id, by, query, signal, side) {
  if (!listed.includes(id) || listedBy !== String(query)) {
    let found;
    do found = await getJson("sessions", { ...asked(Object.fromEntries(query)), limit: 500 }, signal);
    while (found.measured < found.of);
    listedAs(found, String(query));
  }
  const ids = listed.filter((one) => one !== otherOf(side));
  const at = ids.indexOf(id);
  const next = at < 0 ? undefined : ids[at + by];
  if (next === undefined) say(`No ${by > 0 ? "more" : "earlier"} session in the last shown list`);
  else location.hash = link({ id: next, side, mode: side && "beside", list: String(query) });
  return next !== undefined;
}

export async function showList(view) {
  await new ListPage(view).open();
}

class ListPage {
  constructor(view) {
    this.view = view;
    // An exported list has no filters, a fixed order and one page.
    const given = (name) => (view.about.exported && name !== "keys" ? "" : (view.query.get(name) ?? ""));
    this.compares = view.about.text && !view.about.exported && !view.about.only_session;
    this.wanted = Object.fromEntries([...FILTERS, "sort", "order", "page", "keys", "compare"].map((name) => [name, given(name)]));
    this.left = MEASURED;
    this.wanted.sort ||= "created";
    this.wanted.order ||= "desc";
    document.title = "Sessions · Tokentape";
  }

  async open() {
    this.body = h("tbody");
    this.total = h("p", { class: "dim", "aria-live": "polite" });
    this.pager = h("nav", { class: "pager", "aria-label": "Pages" });
    this.heads = h("tr");
    this.chips = h("span", { class: "chips" });
    this.columns = h("div", { class: "menubox" });
    this.comparing = h("span", { "aria-live": "polite" });
    this.asRun = h("a", {}, "Charts of these sessions");
    fill(
      this.view.main,
      h(
        "div",
        { class: "list" },
        h(
          "div",
          { class: "listhead" },
          h("h1", {}, "Sessions"),
          this.total,
          this.comparing,
          h("span", { class: "space" }),
          !this.view.about.exported && !this.view.about.only_session && this.asRun,
          h("details", { class: "menu" }, h("summary", {}, "Columns"), this.columns),
        ),
        this.view.about.exported ? h("div") : filterForm(this.wanted, this.chips, (name, value) => this.#filter(name, value), (pair) => this.#filterMetadata(pair, true), this.view.about.text),
        h("div", { class: "tablebox", tabindex: "0", role: "region", "aria-label": "Sessions" }, h("table", {}, h("thead", {}, this.heads), this.body)),
        this.pager,
      ),
    );
    bindKeys([
      {
        title: "Sessions",
        keys: [
          [["/"], "search", () => document.getElementById("search")?.focus()],
          [["j", "ArrowDown"], "next session", () => this.#move(1)],
          [["k", "ArrowUp"], "session before", () => this.#move(-1)],
          [["Enter"], "open"],
          ...(this.compares ? [[["x"], "choose this session to compare, then a second one", () => this.#compareAt(document.activeElement)], [["Escape"], "cancel the comparison", () => this.#compare("")]] : []),
          [["n"], "next page", () => this.#toPage(this.#page + 1)],
          [["p"], "page before", () => this.#toPage(this.#page - 1)],
        ],
      },
    ]);
    await this.#load();
    this.#watch();
  }

  get #page() {
    return Number(this.wanted.page) || 0;
  }

  #filter(name, value) {
    this.wanted[name] = value;
    this.wanted.page = "";
    clearTimeout(this.typed);
    this.typed = setTimeout(() => this.#again(), 220);
  }

  #filterMetadata(pair, wanted) {
    const others = this.#pairs().filter((one) => one !== pair);
    this.#filter("metadata", [...others, ...(wanted ? [pair] : [])].join("\n"));
  }

  #filterGroup(key, value) {
    this.wanted.group_key = key;
    this.#filter("group_value", value);
  }

  #pairs() {
    return this.wanted.metadata.split("\n").filter(Boolean);
  }

  #sort(key, first) {
    if (this.wanted.sort === key) this.wanted.order = this.wanted.order === "desc" ? "asc" : "desc";
    else Object.assign(this.wanted, { sort: key, order: first });
    this.wanted.page = "";
    this.#again();
  }

  #toPage(page) {
    if (page < 0 || page * PAGE >= this.found.total) return;
    this.wanted.page = page ? String(page) : "";
    this.#again();
    this.view.main.querySelector(".tablebox").scrollTop = 0;
  }

  #again() {
    this.#tell();
    this.#load().catch(this.view.failed);
  }

  #tell() {
    const query = new URLSearchParams(Object.entries(this.wanted).filter(([, value]) => value !== ""));
    history.replaceState(null, "", `#/sessions?${query}`);
  }

  /** The part of session links that describes this list: filters, and the order unless it is the default. */
  #ofList() {
    const usual = { sort: "created", order: "desc", page: this.wanted.page, keys: this.wanted.keys, compare: this.wanted.compare };
    return String(new URLSearchParams(Object.entries(this.wanted).filter(([name, value]) => value !== "" && value !== usual[name])));
  }

  async #load() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    let found;
    try {
      found = await getJson("sessions", { ...asked(this.wanted), offset: this.#page * PAGE, limit: PAGE }, this.view.signal);
    } catch (error) {
      if (error instanceof Refused && error.status === 400) {
        this.total.textContent = error.message;
        return;
      }
      throw error;
    }
    if (turn !== this.turn) return;
    this.found = found;
    listedAs(found, this.#ofList());
    this.#draw();
    clearTimeout(this.going);
    if (found.measured < found.of) this.going = setTimeout(() => this.#load().catch(this.view.failed), 200);
    else this.#measure(this.#unasked(found.sessions));
  }

  /** The sessions to measure without a request, limited because measuring takes the gateway's time. */
  #unasked(sessions) {
    this.left = Math.min(MEASURED, this.left + MORE);
    return sessions.filter((one) => {
      if (one.measures !== null || one.unreadable || one.tokens > this.left) return false;
      this.left -= one.tokens;
      return true;
    });
  }

  /** Metadata keys on this page, most frequent first. */
  #keys() {
    const times = new Map();
    for (const { metadata } of this.found.sessions) for (const key of Object.keys(metadata)) times.set(key, (times.get(key) ?? 0) + 1);
    return [...times.keys()].sort((a, b) => times.get(b) - times.get(a));
  }

  #shownKeys() {
    return this.wanted.keys ? this.wanted.keys.split(",").filter((key) => key !== "-").map(decodeURIComponent) : this.#keys().slice(0, KEYS);
  }

  #draw() {
    const { total, measured, of, unreadable, sessions } = this.found;
    const filtered = FILTERS.some((name) => this.wanted[name]);
    // An exported file contains only the newest sessions.
    const part = this.view.about.exported && sessions.length < total ? `the newest ${count(sessions.length)} of ` : "";
    this.total.textContent =
      `${part}${counted(total, "session")}${part ? "; the other ones are not in this file" : ""}${filtered ? " found" : ""}` +
      (of === undefined ? "" : measured < of ? `, among ${count(measured)} of ${count(of)} measured so far` : `, among the ${count(of)} newest`) +
      (unreadable ? `, ${count(unreadable)} unreadable` : "");
    this.asRun.href = `#/run?${new URLSearchParams(Object.entries(asked(this.wanted)).filter(([name, value]) => value && !["sort", "order"].includes(name)))}`;
    const keys = this.#shownKeys();
    fill(this.heads, ...COLUMNS.map((column) => this.#head(column)), ...keys.map((key) => h("th", { scope: "col", class: "key" }, h("bdi", {}, key))));
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    const on = document.activeElement?.matches?.(".comparer") ? ".comparer" : "a";
    fill(this.body, ...sessions.map((one) => this.#line(one, keys)));
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] ${on}`)?.focus({ preventScroll: true });
    const { compare } = this.wanted;
    if (this.comparing.dataset.of !== compare) {
      this.comparing.dataset.of = compare;
      fill(this.comparing, compare && h("button", { class: "chip", onclick: () => this.#compare(""), "aria-label": `Do not compare ${compare}` }, "Compare ", h("bdi", {}, compare), " with: choose a session ✕"));
    }
    if (!sessions.length) fill(this.body, h("tr", {}, h("td", { colspan: COLUMNS.length + keys.length, class: "empty" }, filtered ? "No session matches." : "No session is recorded yet.")));
    this.#drawColumns(keys);
    fill(
      this.chips,
      this.wanted.group_key && h("button", { class: "chip", onclick: () => this.#filterGroup("", ""), "aria-label": "Remove the group" }, h("bdi", {}, `${this.wanted.group_key} = ${this.wanted.group_value}`), " ✕"),
      ...this.#pairs().map((pair) => h("button", { class: "chip", onclick: () => this.#filterMetadata(pair, false), "aria-label": `Remove ${pair}` }, h("bdi", {}, pair), " ✕")),
    );
    const pages = Math.ceil(total / PAGE);
    const button = (page, text) => h("button", { disabled: page < 0 || page >= pages, onclick: () => this.#toPage(page) }, text);
    fill(
      this.pager,
      ...(pages > 1 && !this.view.about.exported
        ? [
            button(0, "« first"),
            button(this.#page - 1, "‹ before"),
            h("span", {}, `page ${count(this.#page + 1)} of ${count(pages)}`),
            button(this.#page + 1, "next ›"),
            button(pages - 1, "last »"),
          ]
        : []),
    );
  }

  /** The metadata keys that can be columns. The element is not redrawn while it has the focus. */
  #drawColumns(shown) {
    if (this.columns.contains(document.activeElement)) return;
    const known = [...new Set([...this.#keys(), ...shown])].slice(0, 200);
    const choose = (key, on) => {
      const chosen = this.#shownKeys().filter((one) => one !== key);
      if (on) chosen.push(key);
      this.wanted.keys = chosen.map(encodeURIComponent).join(",") || "-";
      this.#tell();
      this.#draw();
    };
    fill(
      this.columns,
      h("span", { class: "dim" }, known.length ? "Metadata keys" : "These sessions have no metadata."),
      ...known.map((key) => h("label", {}, h("input", { type: "checkbox", checked: shown.includes(key), onchange: (event) => choose(key, event.target.checked) }), h("bdi", {}, key))),
    );
  }

  /** Choose a session to compare, or compare with the chosen session. */
  #compare(id) {
    const { compare } = this.wanted;
    if (compare && id && id !== compare) {
      location.hash = this.#address(id);
      return;
    }
    this.wanted.compare = id === compare ? "" : id;
    this.#tell();
    this.#draw();
  }

  #compareAt(element) {
    const id = element.closest("tr")?.dataset.id;
    if (id !== undefined) this.#compare(id);
  }

  /** A session's link: to the session, or to its comparison with the chosen session. */
  #address(id) {
    const { compare } = this.wanted;
    const list = this.#ofList();
    return compare && compare !== id ? link({ id: compare, side: `session-${id}`, mode: "beside", list }) : link({ id, list });
  }

  /** The button that chooses a session to compare. */
  #comparer(id) {
    const { compare } = this.wanted;
    const label = !compare ? `Compare ${id} with another session` : compare === id ? `Do not compare ${id}` : `Compare ${compare} with ${id}`;
    return h("button", { class: "quiet comparer", "aria-pressed": String(compare === id), title: `${label} (x)`, "aria-label": label, onclick: () => this.#compare(id) }, "⇄");
  }

  #head([key, text, first]) {
    const sorted = this.wanted.sort === key;
    const arrow = sorted ? (this.wanted.order === "desc" ? " ↓" : " ↑") : "";
    const fixed = first === null || this.view.about.exported || (key === "drift" && !this.view.about.text);
    return h(
      "th",
      { scope: "col", class: key, "aria-sort": sorted && !fixed ? (this.wanted.order === "desc" ? "descending" : "ascending") : null, title: MEANINGS[key] },
      fixed ? text : h("button", { class: "sort", onclick: () => this.#sort(key, first) }, `${text}${arrow}`),
    );
  }

  #line(one, keys) {
    const metadata = pairs(one.metadata);
    const cell = (name, ...content) => h("td", { class: name }, ...content);
    const row = h(
      "tr",
      { "data-id": one.session_id, onclick: (event) => this.#opened(event, one.session_id) },
      h("td", { class: "session", title: metadata.slice(0, 2000) || null }, h("div", {}, this.compares && this.#comparer(one.session_id), h("a", { href: this.#address(one.session_id) }, one.session_id))),
      cell("created time", when(one.created_at)),
      cell("verdict"),
      cell("drift number"),
      cell("reward number", real(one.reward)),
      cell("role"),
      cell("weights"),
      cell("turns number", count(one.turns)),
      cell("tokens number", count(one.tokens)),
      cell("sampled number", count(one.sampled_tokens)),
      cell("forks number", one.forks ? h("span", { class: "badge fork" }, `↳ ${count(one.forks)}`) : "0"),
      cell("aborted number", one.aborted ? h("span", { class: "badge bad" }, `✕ ${count(one.aborted)}`) : count(one.aborted)),
      ...keys.map((key) => cell("key", key in one.metadata && this.#value(key, one.metadata[key]))),
    );
    this.#drawMeasures(row, one);
    return row;
  }

  #value(key, value) {
    const text = h("bdi", { class: "metadata", title: value.slice(0, 2000) }, value.length > 60 ? `${value.slice(0, 60)}…` : value);
    // A filter is KEY=VALUE in one line.
    if (this.view.about.exported || value.length > 200 || value.includes("\n") || !/^[^=\n]+$/.test(key)) return text;
    return h("button", { class: "quiet", onclick: () => this.#filterMetadata(`${key}=${value}`, true), "aria-label": `Only ${key} = ${value}` }, text);
  }

  #drawMeasures(row, one) {
    const put = (name, ...content) => fill(row.querySelector(`td.${name}`), ...content);
    if (one.unreadable) return void put("verdict", h("span", { class: "badge bad", title: one.unreadable }, "unreadable"));
    if (!one.measures) {
      const measure = () => this.#measure([one]);
      put("drift", this.view.about.exported ? "–" : h("button", { class: "quiet", onclick: measure, "aria-label": `Measure ${one.session_id}` }, "measure"));
      return;
    }
    const { verdicts, roles, weights, drift } = one.measures;
    const [first, ...others] = [...new Set(verdicts)];
    put("verdict", first && verdictBadge(first), others.length > 0 && h("span", { class: "dim", title: others.join("\n") }, ` + ${[...new Set(others.map((one) => one.split(/[:,]/)[0]))].join(", ")}`));
    put("role", h("span", { class: roles.length > 1 || roles[0] !== "main" ? "" : "dim" }, roles.join(", ").replaceAll("_", " ") || "–"));
    put("weights", h("bdi", { title: weights.join("\n") }, weights.length > 1 ? `${weights[0]} … ${weights.at(-1)}` : (weights[0] ?? "–")));
    if (drift === null) return void put("drift", this.view.about.text ? h("span", { class: "dim", title: "the tokenizer lacks one of the session's ids" }, "–") : "–");
    const { changed_tokens: changed, tokens } = drift;
    if (!tokens) return void put("drift", h("span", { class: "dim", title: "nothing is sampled yet" }, "–"));
    const kinds = Object.entries(drift.classes).map(([kind, times]) => `${kind} ${times}`);
    const of = `of ${counted(tokens, "sampled token")}: ${kinds.join(", ")}`;
    put("drift", changed ? h("span", { class: "badge drift", title: of }, `≠ ${counted(changed, "token")}`) : h("span", { class: "dim" }, "none"));
  }

  /** Measure listed sessions. If that fails, the list stays. */
  async #measure(sessions) {
    try {
      await this.#measured(sessions);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Refused) || error.status === 401) this.view.failed(error);
      else say(`Not measured: ${error.message}`);
    }
  }

  async #measured(sessions) {
    if (this.view.about.exported) return;
    const page = this.found;
    for (let at = 0; at < sessions.length && page === this.found; at += AT_ONCE) {
      const some = sessions.slice(at, at + AT_ONCE);
      const { measures, unreadable } = await getJson("measures", { ids: some.map((one) => encodeURIComponent(one.session_id)).join(",") }, this.view.signal);
      for (const one of some) {
        one.measures = measures[one.session_id] ?? null;
        const row = this.body.querySelector(`tr[data-id="${CSS.escape(one.session_id)}"]`);
        one.unreadable = unreadable[one.session_id];
        if (row && (one.measures || one.unreadable)) this.#drawMeasures(row, one);
      }
    }
  }

  #opened(event, id) {
    if (event.target.closest("a, button") || String(getSelection())) return;
    location.hash = this.#address(id);
  }

  #move(by) {
    const links = [...this.body.querySelectorAll("td.session a")];
    const here = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, here < 0 ? 0 : here + by))]?.focus();
  }

  /** Show newly recorded sessions. Slower orders and filters are requested less often. */
  #watch() {
    this.view.signal.addEventListener("abort", () => clearTimeout(this.going));
    if (!this.view.about.grows) return;
    poll(this.view, REFRESH, async () => {
      const begun = performance.now();
      const busy = this.body.querySelector("button:focus:not(.comparer)") || this.found?.measured < this.found?.of;
      if (!busy) await this.#load();
      return Math.max(REFRESH, 20 * (performance.now() - begun));
    });
  }
}
