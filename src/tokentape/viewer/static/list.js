// The sessions: searched, filtered, sorted, a page at a time.

import { Refused, getJson } from "./api.js";
import { count, counted, fill, h, real, when } from "./dom.js";
import { bindKeys } from "./keys.js";
import { CAUSES } from "./tree.js";

const PAGE = 100;
const REFRESH = 4000;
/** Unasked, drift is measured of sessions with so many tokens together, and of each once. */
const MEASURED = 100000;
const AT_ONCE = 10;

const COLUMNS = [
  ["session", "Session", "asc"],
  ["created", "Begun", "desc"],
  ["turns", "Turns", "desc"],
  ["tokens", "Tokens", "desc"],
  ["sampled", "Sampled", "desc"],
  ["reward", "Reward", "desc"],
  ["forks", "Forks", "desc"],
  ["aborted", "Aborted", "desc"],
  ["drift", "Drift", "desc"],
];

const FILTERS = ["search", "fork", "reward_min", "reward_max"];

export async function showList(view) {
  const list = new ListPage(view);
  await list.open();
}

class ListPage {
  constructor(view) {
    this.view = view;
    this.wanted = Object.fromEntries([...FILTERS, "sort", "order", "page"].map((name) => [name, view.query.get(name) ?? ""]));
    this.left = MEASURED;
    this.tried = new Set();
    this.wanted.sort ||= "created";
    this.wanted.order ||= "desc";
    document.title = "Sessions · Tokentape";
  }

  async open() {
    this.body = h("tbody");
    this.total = h("p", { class: "dim", "aria-live": "polite" });
    this.pager = h("nav", { class: "pager", "aria-label": "Pages" });
    this.heads = h("tr");
    fill(
      this.view.main,
      h(
        "div",
        { class: "list" },
        h("div", { class: "listhead" }, h("h1", {}, "Sessions"), this.total),
        this.#filters(),
        h("div", { class: "tablebox", tabindex: "0", role: "region", "aria-label": "Sessions" }, h("table", {}, h("thead", {}, this.heads), this.body)),
        this.pager,
      ),
    );
    bindKeys([
      {
        title: "Sessions",
        keys: [
          [["/"], "search", () => document.getElementById("search").focus()],
          [["j", "ArrowDown"], "next session", () => this.#move(1)],
          [["k", "ArrowUp"], "session before", () => this.#move(-1)],
          [["Enter"], "open"],
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

  #filters() {
    const field = (name, attributes) =>
      h("input", { id: name, value: this.wanted[name], oninput: (event) => this.#filter(name, event.target.value), ...attributes });
    const causes = [["", "any"], ["any", "with a fork"], ["none", "without"], ...Object.keys(CAUSES).map((cause) => [cause, cause])];
    return h(
      "form",
      { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      h("label", { for: "search" }, "Search"),
      field("search", { type: "search", placeholder: "id or metadata", spellcheck: "false" }),
      h("label", { for: "fork" }, "Forks"),
      h(
        "select",
        { id: "fork", onchange: (event) => this.#filter("fork", event.target.value) },
        ...causes.map(([value, text]) => h("option", { value, selected: value === this.wanted.fork }, text)),
      ),
      h("label", { for: "reward_min" }, "Reward from"),
      field("reward_min", { type: "number", step: "any", class: "short" }),
      h("label", { for: "reward_max" }, "to"),
      field("reward_max", { type: "number", step: "any", class: "short" }),
    );
  }

  #filter(name, value) {
    this.wanted[name] = value;
    this.wanted.page = "";
    clearTimeout(this.typed);
    this.typed = setTimeout(() => this.#again(), 220);
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
    const query = new URLSearchParams(Object.entries(this.wanted).filter(([, value]) => value !== ""));
    history.replaceState(null, "", `#/sessions?${query}`);
    this.#load().catch(this.view.failed);
  }

  async #load() {
    const { page, ...rest } = this.wanted;
    const asked = (this.asked = (this.asked ?? 0) + 1);
    let found;
    try {
      found = await getJson("sessions", { ...rest, offset: this.#page * PAGE, limit: PAGE }, this.view.signal);
    } catch (error) {
      if (error instanceof Refused && error.status === 400) {
        this.total.textContent = error.message;
        return;
      }
      throw error;
    }
    if (asked !== this.asked) return;
    this.found = found;
    this.#draw();
    this.#measure(this.#unasked(found.sessions)).catch(this.view.failed);
  }

  /** The sessions to measure unasked: it is the gateway's time. */
  #unasked(sessions) {
    return sessions.filter((one) => {
      if (one.drift !== null || this.tried.has(one.session_id) || one.tokens > this.left) return false;
      this.left -= one.tokens;
      this.tried.add(one.session_id);
      return true;
    });
  }

  #draw() {
    const { total, measured, sessions } = this.found;
    const filtered = FILTERS.some((name) => this.wanted[name]);
    this.total.textContent =
      `${counted(total, "session")}${filtered ? " found" : ""}` +
      (this.wanted.sort === "drift" ? `: those whose drift was measured, ${count(measured)} so far` : "");
    fill(this.heads, ...COLUMNS.map((column) => this.#head(column)));
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    fill(this.body, ...sessions.map((one) => this.#line(one)));
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] a`)?.focus({ preventScroll: true });
    if (!sessions.length) fill(this.body, h("tr", {}, h("td", { colspan: COLUMNS.length, class: "empty" }, filtered ? "No session is like that." : "No session is recorded yet.")));
    const pages = Math.ceil(total / PAGE);
    const button = (page, text) => h("button", { disabled: page < 0 || page >= pages, onclick: () => this.#toPage(page) }, text);
    fill(
      this.pager,
      ...(pages > 1
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

  #head([key, text, first]) {
    const sorted = this.wanted.sort === key;
    const arrow = sorted ? (this.wanted.order === "desc" ? " ↓" : " ↑") : "";
    return h(
      "th",
      { scope: "col", class: key, "aria-sort": sorted ? (this.wanted.order === "desc" ? "descending" : "ascending") : null },
      key === "drift" && !this.view.about.text
        ? text
        : h("button", { class: "sort", onclick: () => this.#sort(key, first), title: key === "drift" ? "trained tokens that tokenizing the text again would change" : null }, `${text}${arrow}`),
    );
  }

  #line(one) {
    const metadata = JSON.stringify(one.metadata);
    const drift = h("td", { class: "number drift" });
    this.#drawDrift(drift, one);
    return h(
      "tr",
      { "data-id": one.session_id, onclick: (event) => this.#opened(event, one.session_id) },
      h(
        "td",
        { class: "session" },
        h("a", { href: `#/session/${encodeURIComponent(one.session_id)}` }, one.session_id),
        metadata !== "{}" && h("span", { class: "metadata", title: metadata }, metadata.length > 160 ? `${metadata.slice(0, 160)}…` : metadata),
      ),
      h("td", { class: "time" }, when(one.created_at)),
      h("td", { class: "number" }, count(one.turns)),
      h("td", { class: "number" }, count(one.tokens)),
      h("td", { class: "number" }, count(one.sampled_tokens)),
      h("td", { class: "number" }, real(one.reward)),
      h("td", { class: "number" }, one.forks ? h("span", { class: "badge fork" }, `↳ ${count(one.forks)}`) : "0"),
      h("td", { class: "number" }, one.aborted ? h("span", { class: "badge bad" }, `✕ ${count(one.aborted)}`) : "0"),
      drift,
    );
  }

  #drawDrift(cell, one) {
    if (one.drift) {
      const { changed_tokens: changed, tokens } = one.drift;
      const kinds = Object.entries(one.drift.classes).map(([kind, times]) => `${kind} ${times}`);
      fill(cell, changed ? h("span", { class: "badge drift", title: kinds.join(", ") }, `≠ ${count(changed)} of ${count(tokens)}`) : h("span", { class: "dim" }, "none"));
    } else if (this.view.about.text) {
      fill(cell, h("button", { class: "quiet", onclick: () => this.#measure([one]).catch(this.view.failed), "aria-label": `Measure the drift of ${one.session_id}` }, "measure"));
    } else {
      fill(cell, "–");
    }
  }

  async #measure(sessions) {
    if (!this.view.about.text) return;
    const page = this.found;
    for (let at = 0; at < sessions.length && page === this.found; at += AT_ONCE) {
      const some = sessions.slice(at, at + AT_ONCE);
      const { drift } = await getJson("drift", { ids: some.map((one) => one.session_id).join(",") }, this.view.signal);
      for (const one of some) {
        one.drift = drift[one.session_id] ?? null;
        const cell = this.body.querySelector(`tr[data-id="${CSS.escape(one.session_id)}"] .drift`);
        if (cell && one.drift) this.#drawDrift(cell, one);
      }
    }
  }

  #opened(event, id) {
    if (event.target.closest("a, button") || String(getSelection())) return;
    location.hash = `#/session/${encodeURIComponent(id)}`;
  }

  #move(by) {
    const links = [...this.body.querySelectorAll("td.session a")];
    const here = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, here < 0 ? 0 : here + by))]?.focus();
  }

  /** Newer sessions appear while the newest are shown; orders that cost more are left as they are. */
  #watch() {
    if (!this.view.about.grows) return;
    const look = async () => {
      if (this.view.signal.aborted) return;
      const cheap = this.wanted.sort === "created" && this.wanted.order === "desc" && this.#page === 0;
      try {
        if (cheap && document.visibilityState === "visible" && !this.body.querySelector("button:focus")) await this.#load();
      } catch (error) {
        if (error.name === "AbortError") return;
        if (error instanceof Refused && error.status === 401) {
          this.view.failed(error);
          return;
        }
      }
      this.timer = setTimeout(look, REFRESH);
    };
    this.timer = setTimeout(look, REFRESH);
    this.view.signal.addEventListener("abort", () => clearTimeout(this.timer));
  }
}
