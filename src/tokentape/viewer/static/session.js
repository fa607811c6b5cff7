// One session: its tree, one of its trajectories, and what is known of each token.

import { Refused, getIfNew, getJson, getPacked, sessionPath } from "./api.js";
import { Comparison, ComparisonView, sideName } from "./compare.js";
import { copy, count, counted, fill, h, real, say, when } from "./dom.js";
import { Finder } from "./finder.js";
import { inspect, pythonList } from "./inspector.js";
import { bindKeys } from "./keys.js";
import { legend } from "./legend.js";
import { neighbour } from "./list.js";
import { Minimap } from "./minimap.js";
import { SAMPLED, Trajectory } from "./model.js";
import { RecordView } from "./record.js";
import { drawTree, markTurn, verdictBadge } from "./tree.js";

const OFTEN = 1500;
const SELDOM = 10000;
/** Asked so seldom once nothing has changed for a minute. */
const QUIET = 60000;

const MODES = { conversation: "Conversation", tokens: "Tokens", beside: "Side by side" };

/** `#/session/ID/leaf/3/token/17/with/rerendered/view/beside` and parts of it. */
function parse(parts) {
  const found = { id: parts[1] };
  for (let n = 2; n + 1 < parts.length; n += 2) found[parts[n]] = parts[n + 1];
  const number = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);
  return { id: found.id, leaf: number(found.leaf), turn: number(found.turn), token: number(found.token), side: found.with, mode: found.view };
}

export async function showSession(view) {
  const address = parse(view.parts);
  const page = new SessionPage(view, address);
  await page.open();
}

class SessionPage {
  constructor(view, address) {
    this.view = view;
    this.address = address;
    this.id = address.id;
    const branch = view.about.text && !view.about.exported && /^leaf-\d{1,15}$/.test(address.side ?? "");
    this.side = branch || view.about.against.includes(address.side) ? address.side : (view.about.against[0] ?? null);
    this.mode = address.mode in MODES && (address.mode !== "beside" || this.side !== null) ? address.mode : "conversation";
    this.following = false;
    this.alternatives = new Map();
    this.selection = null;
    this.comparisons = new Map();
    document.title = `${this.id} · Tokentape`;
  }

  get beside() {
    return this.mode === "beside";
  }

  async open() {
    const { etag, value } = await getIfNew(sessionPath(this.id), null, this.view.signal);
    this.etag = etag;
    this.tree = value;
    this.leaf = this.#leafOf(this.address);
    this.#frame();
    this.#drawTree();
    if (this.leaf !== null) await this.#load();
    else this.#nothing();
    if (this.view.about.grows) this.#watch();
    this.view.signal.addEventListener("abort", () => this.#close());
  }

  /** The leaf of an address: that leaf, the newest one after its turn, or without either the newest, main ones first. */
  #leafOf({ leaf, turn }) {
    const { leaves } = this.tree;
    if (!leaves.length) return null;
    const leafAfter = (seq) => leaves.filter((one) => one.path.includes(seq)).at(-1)?.turn;
    if (leaf !== null) {
      const found = leaves.find((one) => one.turn === leaf)?.turn ?? leafAfter(leaf);
      if (found === undefined) throw new Refused(404, `Session ${this.id} has no leaf ${leaf}.`);
      return found;
    }
    const main = leaves.filter((one) => !one.role || one.role === "main");
    return (turn === null ? undefined : leafAfter(turn)) ?? (main.at(-1) ?? leaves.at(-1)).turn;
  }

  #frame() {
    this.parts = {
      head: h("div", { class: "sessionhead" }),
      tree: h("nav", { class: "tree", "aria-label": "Turns" }),
      tools: h("div", { class: "tools" }),
      pane: h("section", { class: "pane", tabindex: "0", "aria-label": "Tokens" }),
      map: h("canvas", { class: "minimap", "aria-hidden": "true" }),
      inspector: h("aside", { class: "inspector", "aria-label": "Token" }),
    };
    const { head, tree, tools, pane, map, inspector } = this.parts;
    this.finder = new Finder({
      trajectory: () => this.trajectory,
      at: () => this.selection?.i ?? -1,
      choose: (i) => this.#chooseInRecord(i),
      toTurn: (seq) => this.#toTurnNumber(seq),
    });
    const middle = h("div", { class: "middle" }, h("div", { class: "toolbar" }, tools, this.finder.element), legend(), h("div", { class: "reading" }, pane, map));
    fill(this.view.main, h("div", { class: "session" }, head, tree, middle, inspector));
    this.minimap = new Minimap(map, (i) => this.record?.reveal(i));
    this.resized = new ResizeObserver(() => this.#drawMap());
    this.resized.observe(map);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.#drawMap();
    this.scheme.addEventListener("change", this.repaint);
    this.themed = new MutationObserver(this.repaint);
    this.themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    pane.addEventListener("click", (event) => this.#clicked(event));
    pane.addEventListener("mouseover", (event) => this.#pointed(event));
    pane.addEventListener("mouseleave", () => this.#inspect());
    pane.addEventListener("focusin", (event) => this.#focused(event));
    pane.addEventListener("scroll", () => {
      this.following = this.live && pane.scrollTop + pane.clientHeight > pane.scrollHeight - 80;
      this.looking ??= requestAnimationFrame(() => this.#markTurn());
    });
    bindKeys(this.#keys());
  }

  #nothing() {
    fill(this.parts.tools);
    fill(this.parts.pane, h("p", { class: "empty" }, this.view.about.grows ? "No turn is recorded yet." : "There is no turn."));
    this.#drawHead();
  }

  async #load() {
    const packed = await getPacked(sessionPath(this.id, "leaves", this.leaf), {}, this.view.signal);
    this.trajectory = new Trajectory(packed);
    this.comparisons.clear();
    this.#show();
    const { token, turn } = this.address;
    if (token !== null && token < this.trajectory.length) this.choose(token);
    else if (turn !== null) this.#toTurn(this.trajectory.about.turns.findIndex((one) => one.seq === turn));
    else if (this.mode === "conversation") this.#toFirstSampled();
    await this.#compare();
  }

  /** Where the model speaks first, unless that is in view. */
  #toFirstSampled() {
    const i = this.trajectory.provenance.indexOf(SAMPLED);
    const element = i < 0 ? null : this.record.pane.element(i);
    if (element && !inSight(element, this.parts.pane)) this.record.reveal(i);
  }

  #markTurn() {
    this.looking = null;
    const turn = this.record && this.trajectory.about.turns[this.record.turnInView()];
    if (!turn) return;
    markTurn(this.parts.tree, turn.seq);
    this.finder.inView(turn.seq);
  }

  /** Draw the trajectory, as a record or beside another. */
  #show() {
    this.record?.close();
    this.record = null;
    this.compared?.close();
    this.compared = null;
    fill(this.parts.pane);
    this.parts.pane.scrollTop = 0;
    this.parts.pane.classList.toggle("beside", this.beside);
    const comparison = this.comparisons.get(this.side);
    if (!this.beside) {
      this.record = new RecordView(this.parts.pane, this.trajectory, { turnLink: (turn) => this.#link({ turn }) }, this.mode === "conversation");
      this.record.setComparison(comparison ?? null);
      if (this.selection) this.record.select(this.selection);
    } else if (comparison) {
      this.compared = new ComparisonView(this.parts.pane, this.trajectory, comparison, (i) => this.choose(i, { quiet: true }));
    } else {
      fill(this.parts.pane, h("p", { class: "empty" }, "Comparing…"));
    }
    this.#drawHead();
    this.#drawTools();
    this.#drawTree();
    this.#drawMap();
    this.#inspect();
  }

  async #compare() {
    if (this.side === null) return;
    const side = this.side;
    if (!this.comparisons.has(side)) {
      this.problem = null;
      try {
        const path = sessionPath(this.id, "leaves", this.leaf, "comparison");
        this.comparisons.set(side, new Comparison(await getPacked(path, { with: side }, this.view.signal)));
      } catch (error) {
        if (!(error instanceof Refused) || error.status === 401) throw error;
        this.problem = error.message;
      }
    }
    if (side !== this.side) return;
    if (this.beside && this.problem) fill(this.parts.pane, h("p", { class: "empty", role: "alert" }, this.problem));
    else if (this.beside) this.#show();
    else {
      this.record.setComparison(this.comparisons.get(side) ?? null);
      this.#drawTools();
      this.#drawMap();
      this.#inspect();
    }
  }

  // What is around the tokens.

  #drawHead() {
    const { tree } = this;
    const leaf = tree.leaves.find((one) => one.turn === this.leaf);
    const facts = leaf
      ? [counted(leaf.tokens, "token"), `${count(leaf.sampled_tokens)} sampled`, `${count(leaf.trained_tokens)} trained`]
      : [];
    if (tree.created_at) facts.push(`begun ${when(tree.created_at)}`);
    if (tree.owner) facts.push(`key ${tree.owner}`);
    const metadata = JSON.stringify(tree.metadata);
    fill(
      this.parts.head,
      h("h1", {}, tree.session_id),
      leaf && h("span", { class: "dim" }, `branch to turn ${leaf.turn}`),
      leaf && verdictBadge(leaf.verdict),
      leaf?.role && leaf.role !== "main" && h("span", { class: "badge", title: "by lineage" }, leaf.role.replace("_", " ")),
      leaf && h("span", { class: "badge" }, leaf.reward === null ? "no reward" : `reward ${real(leaf.reward)}`),
      h("span", { class: "dim" }, facts.join(" · ")),
      metadata !== "{}" && h("span", { class: "metadata", title: metadata }, metadata),
      h("span", { class: "space" }),
      h("button", { class: "quiet", onclick: () => this.#toNeighbour(-1), title: "Session before (K)", "aria-label": "Session before" }, "‹"),
      h("button", { class: "quiet", onclick: () => this.#toNeighbour(1), title: "Next session (J)", "aria-label": "Next session" }, "›"),
      this.#isLive() && h("span", { class: "live", title: "turns appear as they are recorded" }, h("span", { class: "dot", "aria-hidden": "true" }), "live"),
    );
  }

  /** What the branch can be compared with: the other branches too, where there is a tokenizer. */
  #sides() {
    const { against, text, exported } = this.view.about;
    const others = text && !exported ? this.tree.leaves.filter((one) => one.turn !== this.leaf) : [];
    return [...against, ...others.slice(0, 50).map((one) => `leaf-${one.turn}`)];
  }

  /** Whether a turn was recorded within the last minute. */
  #isLive() {
    return this.view.about.grows && 1000 * (this.tree.turns.at(-1)?.created_at ?? 0) > Date.now() - QUIET;
  }

  async #toNeighbour(by) {
    const next = await neighbour(this.id, by, this.view.signal);
    if (next === undefined) say(`No ${by > 0 ? "more" : "earlier"} session in the list as it was shown last`);
    else location.hash = `#/session/${encodeURIComponent(next)}`;
  }

  #drawTools() {
    const comparison = this.comparisons.get(this.side);
    const sides = this.#sides();
    const tab = ([mode, text]) =>
      h("button", { "aria-pressed": String(this.mode === mode), onclick: () => this.#setMode(mode), disabled: mode === "beside" && !sides.length }, text);
    const select = h(
      "select",
      { id: "side", onchange: (event) => this.#setSide(event.target.value) },
      ...sides.map((side) => h("option", { value: side, selected: side === this.side }, sideName(side))),
    );
    fill(
      this.parts.tools,
      h("button", { class: "totree", "aria-expanded": "false", onclick: () => this.#showTree() }, "Turns"),
      h("div", { class: "segmented", role: "group", "aria-label": "View" }, ...Object.entries(MODES).map(tab)),
      sides.length && h("label", { for: "side" }, "drift against"),
      sides.length && select,
      comparison && h("span", { class: comparison.changes.length ? "driftcount" : "dim", title: [...comparison.classes().map(([name, times]) => `${name} ${times}`), counted(comparison.about.changed_tokens, "token")].join(", ") }, comparison.changes.length ? `≠ ${counted(comparison.changes.length, "difference")}` : "no drift"),
      comparison?.changes.length > 0 && h("button", { class: "quiet", onclick: () => this.#toChange(-1), title: "Previous (p)", "aria-label": "Previous difference" }, "↑"),
      comparison?.changes.length > 0 && h("button", { class: "quiet", onclick: () => this.#toChange(1), title: "Next (n)", "aria-label": "Next difference" }, "↓"),
      !this.beside && this.problem && h("span", { class: "dim" }, this.problem),
    );
  }

  /** The tree of a narrow window, over the tokens. */
  #showTree(shown = !this.parts.tree.classList.contains("shown")) {
    this.parts.tree.classList.toggle("shown", shown);
    this.parts.tools.querySelector(".totree")?.setAttribute("aria-expanded", String(shown));
    if (shown) this.parts.tree.querySelector("[aria-current], a")?.focus();
  }

  #drawTree() {
    drawTree(this.parts.tree, this.tree, this.leaf, (turn) => {
      const leaf = this.tree.leaves.filter((one) => one.path.includes(turn.seq));
      const keeps = leaf.some((one) => one.turn === this.leaf) ? this.leaf : leaf.at(-1)?.turn;
      return keeps === undefined ? `#/session/${encodeURIComponent(this.id)}` : this.#link({ leaf: keeps, turn: turn.seq });
    });
    this.#markTurn();
  }

  #drawMap() {
    if (this.trajectory) this.minimap.draw(this.trajectory, this.comparisons.get(this.side), this.selection?.i ?? null);
  }

  #inspect(i = this.selection?.i) {
    const { inspector } = this.parts;
    if (!this.trajectory || i === undefined) {
      fill(inspector, h("h2", {}, "Token"), h("p", { class: "dim" }, "Point at a token, or choose one: ", h("kbd", {}, "→"), " the next, ", h("kbd", {}, "n"), " the next difference, ", h("kbd", {}, "?"), " all keys."));
      return;
    }
    const pinned = this.selection !== null && i === this.selection.i;
    const at = pinned ? { ...this.selection, pinned } : { i, from: i, to: i + 1, pinned };
    const comparison = this.comparisons.get(this.side);
    const change = comparison?.changeAt(i);
    inspect(inspector, this.trajectory, at, change ? comparison.describe(change) : null, {
      permalink: () => new URL(this.#link({ token: i }), location.href).href,
      alternatives: (turn) => this.#alternatives(turn),
    });
  }

  /** The alternatives per token of a turn: asked for when they are first needed. */
  #alternatives({ seq, alternatives }) {
    if (!alternatives) return null;
    if (!this.alternatives.has(seq)) {
      this.alternatives.set(seq, undefined);
      getJson(sessionPath(this.id, "turns", seq, "alternatives"), {}, this.view.signal)
        .then((found) => {
          this.alternatives.set(seq, found.alternatives);
          this.#inspect();
        })
        .catch((error) => error.name !== "AbortError" && this.view.failed(error));
    }
    return this.alternatives.get(seq);
  }

  // Choosing tokens.

  /** Choose a token, or a range up to it; bring it into view and say so in the address. */
  choose(i, { extend = false, quiet = false } = {}) {
    if (!this.trajectory.length) return;
    i = Math.max(0, Math.min(this.trajectory.length - 1, i));
    const anchor = extend && this.selection ? this.selection.anchor : i;
    this.selection = { i, anchor, from: Math.min(i, anchor), to: Math.max(i, anchor) + 1 };
    if (this.record) {
      this.record.open(i);
      const known = this.record.pane.drawnElement(i);
      const element = known ?? this.record.pane.element(i);
      this.record.select(this.selection);
      if (!quiet && !inSight(element, this.parts.pane)) this.record.pane.reveal(i);
      this.moving = true;
      element.focus({ preventScroll: true });
      this.moving = false;
    }
    this.#tell();
    this.#drawMap();
    this.#inspect();
  }

  /** Say in the address what is shown, a little later: browsers take only so many changes of it while a key repeats. */
  #tell() {
    clearTimeout(this.telling);
    this.telling = setTimeout(() => history.replaceState(null, "", this.#link({ token: this.selection?.i })), 80);
  }

  #clear() {
    this.#showTree(false);
    this.selection = null;
    this.record?.select(null);
    this.#tell();
    this.parts.pane.focus({ preventScroll: true });
    this.#drawMap();
    this.#inspect();
  }

  #clicked(event) {
    const token = event.target.closest?.("[data-i]");
    if (!token || !this.record || String(getSelection())) return;
    this.choose(Number(token.dataset.i), { extend: event.shiftKey, quiet: true });
  }

  #pointed(event) {
    const token = event.target.closest?.(".recorded [data-i], .row [data-i]");
    if (token) this.#inspect(Number(token.dataset.i));
  }

  #focused(event) {
    const token = event.target.closest?.(".row [data-i]");
    if (token && !this.moving && Number(token.dataset.i) !== this.selection?.i) this.choose(Number(token.dataset.i), { quiet: true });
  }

  #step(by) {
    return (event) => this.choose(this.selection ? (this.record?.next(this.selection.i, by) ?? this.selection.i + by) : this.#firstSeen(), { extend: event.shiftKey });
  }

  /** The token of the next line that is about below. */
  #line(by) {
    return (event) => {
      const from = this.selection && this.record?.pane.drawnElement(this.selection.i);
      if (!from) {
        this.choose(this.#firstSeen());
        return;
      }
      const here = from.getClientRects()[0];
      let best = this.selection.i;
      let line = null;
      for (let i = this.record.next(this.selection.i, by), steps = 0; i >= 0 && i < this.trajectory.length && steps < 600; i = this.record.next(i, by), steps++) {
        const rect = this.record.pane.element(i)?.getClientRects()[0];
        if (!rect || Math.abs(rect.top - here.top) < 8) continue;
        line ??= rect.top;
        if (Math.abs(rect.top - line) > 8) break;
        best = i;
        if (by > 0 ? rect.right > here.left + 2 : rect.left <= here.left + 2) break;
      }
      this.choose(best, { extend: event.shiftKey });
    };
  }

  #firstSeen() {
    const { top } = this.parts.pane.getBoundingClientRect();
    for (const block of [...(this.record?.pane.drawn ?? [])].sort((a, b) => a.start - b.start)) {
      for (const element of block.element.querySelectorAll("[data-i]")) {
        if (element.getBoundingClientRect().top >= top) return Number(element.dataset.i);
      }
    }
    return 0;
  }

  #toTurn(n) {
    const turn = this.trajectory.about.turns[n];
    if (turn) this.choose(turn.start);
  }

  /** Go to a turn by its number, on whatever branch it is. */
  #toTurnNumber(seq) {
    const n = this.trajectory?.about.turns.findIndex((one) => one.seq === seq) ?? -1;
    const leaf = this.tree.leaves.find((one) => one.path.includes(seq));
    if (n >= 0) this.#chooseInRecord(this.trajectory.about.turns[n].start);
    else if (leaf) location.hash = this.#link({ leaf: leaf.turn, turn: seq });
    else say(`There is no turn ${seq} on a branch`);
  }

  #chooseInRecord(i) {
    if (this.beside) this.#setMode("conversation");
    this.choose(i);
  }

  #toNext(places, by, what) {
    const here = this.selection?.i ?? -1;
    const next = by > 0 ? places.find((place) => place > here) : places.findLast((place) => place < here);
    if (next === undefined) say(places.length ? `No ${by > 0 ? "more" : "earlier"} ${what}` : `There is no ${what}`);
    else this.choose(next);
  }

  #toChange(by) {
    const changes = this.comparisons.get(this.side)?.changes ?? [];
    if (!this.beside) {
      this.#toNext(changes.map((change) => Math.min(change.start, this.trajectory.length - 1)), by, "difference");
      return;
    }
    const start = this.compared?.toChange(by);
    if (start === undefined) say("No more differences");
    else this.choose(start, { quiet: true });
  }

  #setMode(mode) {
    if (mode === this.mode || (mode === "beside" && this.side === null)) return;
    const turn = this.record?.turnInView() ?? 0;
    this.mode = mode;
    this.#tell();
    this.#show();
    if (this.record && this.selection) this.choose(this.selection.i);
    else this.record?.sections[turn]?.scrollIntoView();
    this.#compare();
  }

  #setSide(side) {
    this.side = side;
    this.problem = null;
    this.#tell();
    if (this.beside) this.#show();
    this.#compare();
  }

  #link({ leaf = this.leaf, turn = null, token = null }) {
    const parts = ["session", this.id];
    if (leaf !== null) parts.push("leaf", leaf);
    if (turn !== null) parts.push("turn", turn);
    if (token !== null && token !== undefined) parts.push("token", token);
    if (this.side && this.side !== this.view.about.against[0]) parts.push("with", this.side);
    if (this.mode !== "conversation") parts.push("view", this.mode);
    return `#/${parts.map(encodeURIComponent).join("/")}`;
  }

  #keys() {
    const turns = () => this.trajectory.about.turns;
    const turnStep = (by) => () => {
      const n = this.selection ? this.trajectory.turnOf(this.selection.i) : -1;
      this.#toTurn(Math.max(0, Math.min(turns().length - 1, n + by)));
    };
    const forks = () => turns().filter((turn) => turn.fork || turn.left_by.length).map((turn) => (turn.fork ? turn.start : turn.end - 1));
    const weights = () => this.trajectory.weightBoundaries().map((one) => one.start);
    const ids = () => {
      const { from, to } = this.selection ?? { from: 0, to: this.trajectory.length };
      copy(pythonList(this.trajectory.ids.subarray(from, to)), counted(to - from, "id"));
    };
    const having = (run) => (event) => this.trajectory && run(event);
    const of = (title, keys) => ({ title, keys: keys.map(([names, what, run]) => [names, what, run && having(run)]) });
    return [
      of("Tokens", [
        [["ArrowRight", "l"], "next token", this.#step(1)],
        [["ArrowLeft", "h"], "token before", this.#step(-1)],
        [["ArrowDown", "j"], "a line down", this.#line(1)],
        [["ArrowUp", "k"], "a line up", this.#line(-1)],
        [["Home"], "first token", () => this.choose(0)],
        [["End"], "last token", () => this.choose(this.trajectory.length - 1)],
        [["Shift+ArrowRight"], "choose more tokens", this.#step(1)],
        [["Shift+ArrowLeft"], "choose fewer", this.#step(-1)],
        [["Shift+ArrowDown"], "choose a line more", this.#line(1)],
        [["Escape"], "choose none", () => this.#clear()],
      ]),
      of("Places", [
        [["/"], "find text", () => this.finder.field.focus()],
        [["g t"], "go to a turn", () => this.finder.turn.focus()],
        [["J"], "next session", () => this.#toNeighbour(1)],
        [["K"], "session before", () => this.#toNeighbour(-1)],
        [["n"], "next difference", () => this.#toChange(1)],
        [["p"], "difference before", () => this.#toChange(-1)],
        [["]"], "next turn", turnStep(1)],
        [["["], "turn before", turnStep(-1)],
        [["f"], "next fork", () => this.#toNext(forks(), 1, "fork")],
        [["F"], "fork before", () => this.#toNext(forks(), -1, "fork")],
        [["w"], "next change of weights", () => this.#toNext(weights(), 1, "change of weights")],
        [["W"], "change of weights before", () => this.#toNext(weights(), -1, "change of weights")],
      ]),
      of("Views", [
        [["s"], "side by side, or the conversation", () => this.#setMode(this.beside ? "conversation" : "beside")],
        [["v"], "every token, or the conversation", () => this.#setMode(this.mode === "conversation" ? "tokens" : "conversation")],
        [["o"], "the turns, in a narrow window", () => this.#showTree()],
        [["d"], "drift against the other", () => this.#otherSide()],
        [["c"], "copy the chosen ids, or all", ids],
        [["y"], "copy the link", () => copy(new URL(this.#link({ token: this.selection?.i }), location.href).href, "the link")],
      ]),
    ];
  }

  #otherSide() {
    const sides = this.#sides();
    if (sides.length > 1) this.#setSide(sides[(sides.indexOf(this.side) + 1) % sides.length]);
    say(this.side ? `Drift against: ${sideName(this.side)}` : "Nothing to compare with");
    this.#drawTools();
  }

  // A session that goes on.

  #watch() {
    this.live = true;
    let changed = performance.now();
    const look = async () => {
      if (this.view.signal.aborted) return;
      try {
        if (document.visibilityState === "visible" && (await this.#refresh())) changed = performance.now();
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof Refused) || (error.status !== 0 && error.status < 500)) {
          this.view.failed(error);
          return;
        }
        // Away for a moment: asked again later.
      }
      this.timer = setTimeout(look, performance.now() - changed > QUIET ? SELDOM : OFTEN);
    };
    this.timer = setTimeout(look, OFTEN);
  }

  /** Take what is new; whether there was anything. */
  async #refresh() {
    const found = await getIfNew(sessionPath(this.id), this.etag, this.view.signal);
    if (found === null) return false;
    this.etag = found.etag;
    this.tree = found.value;
    if (this.leaf === null) {
      this.leaf = this.#leafOf({ leaf: null, turn: null });
      if (this.leaf !== null) await this.#load();
      return true;
    }
    // What continues the branch that is shown: where several do, the one that is not a fork.
    const onward = this.tree.leaves.find((one) => one.path.includes(this.leaf));
    const follow = this.following;
    this.leaf = onward?.turn ?? this.tree.leaves.at(-1)?.turn ?? null;
    if (this.leaf === null) return true;
    if (onward === undefined || !this.trajectory) {
      // Another session of the same id.
      await this.#load();
      return true;
    }
    const packed = await getPacked(sessionPath(this.id, "leaves", this.leaf), { from: this.trajectory.length }, this.view.signal);
    this.trajectory = this.trajectory.grownBy(packed);
    this.comparisons.clear();
    if (this.record) {
      this.record.grow(this.trajectory);
      this.#drawHead();
      this.#drawTree();
      this.#drawMap();
      this.#inspect();
    } else {
      this.#show();
    }
    this.#tell();
    if (follow) this.parts.pane.scrollTop = this.parts.pane.scrollHeight;
    await this.#compare();
    return true;
  }

  #close() {
    clearTimeout(this.timer);
    clearTimeout(this.telling);
    cancelAnimationFrame(this.looking);
    this.record?.close();
    this.compared?.close();
    this.resized.disconnect();
    this.themed.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
  }
}

function inSight(element, pane) {
  const one = element.getBoundingClientRect();
  const all = pane.getBoundingClientRect();
  return one.top >= all.top + 40 && one.bottom <= all.bottom - 20;
}
