// One session: its tree, one of its trajectories, and details of each token.

import { leafOf, link, otherOf, parse } from "./address.js";
import { Refused, getIfNew, getPacked, sessionPath } from "./api.js";
import { Comparison, ComparisonView, sideName } from "./compare.js";
import { fill, h, say } from "./dom.js";
import { Finder } from "./finder.js";
import { Alternatives, inspect } from "./inspector.js";
import { bindKeys, holdKeys } from "./keys.js";
import { legend } from "./legend.js";
import { toNeighbour } from "./list.js";
import { Minimap } from "./minimap.js";
import { SAMPLED, Trajectory } from "./model.js";
import { poll } from "./polling.js";
import { RecordView } from "./record.js";
import { MODES, drawHead, drawTools, otherSessions, sidesOf } from "./session_bar.js";
import { sessionKeys } from "./session_keys.js";
import { drawTree, markTurn } from "./tree.js";

const OFTEN = 1500;
const SELDOM = 10000;
/** The slower polling interval once nothing has changed for a minute. */
const QUIET = 60000;

export async function showSession(view) {
  await new SessionPage(view, parse(view.parts, view.query)).open();
}

class SessionPage {
  constructor(view, address) {
    this.view = view;
    this.address = address;
    this.id = address.id;
    const branch = view.about.text && !view.about.exported && /^(leaf-\d{1,15}(-of-.+)?|session-.+)$/s.test(address.side ?? "");
    this.side = branch || view.about.against.includes(address.side) ? address.side : (view.about.against[0] ?? null);
    if (address.side && this.side !== address.side) say("The comparison in this URL is not available here");
    this.mode = address.mode in MODES && (address.mode !== "beside" || this.side !== null) ? address.mode : "conversation";
    this.alternatives = new Alternatives(view, () => this.#inspect());
    this.selection = null;
    this.comparisons = new Map();
    this.sides = [];
  }

  get beside() {
    return this.mode === "beside";
  }

  /** The shown tokens, or null while none are shown. */
  get shown() {
    return this.record ?? this.compared;
  }

  async open() {
    await this.#loadTree();
    this.leaf = leafOf(this.tree, this.address);
    this.#frame();
    this.view.signal.addEventListener("abort", () => this.#close());
    this.#drawTree();
    if (this.leaf !== null) await this.#load();
    else this.#nothing();
    if (this.view.about.grows) this.#watch();
  }

  /** Load the tree. Return whether it has changed. */
  async #loadTree() {
    const found = await getIfNew(sessionPath(this.id), this.etag, this.view.signal);
    if (found) ({ etag: this.etag, value: this.tree } = found);
    return found !== null;
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
    pane.addEventListener("click", (event) => this.#clicked(event));
    pane.addEventListener("mouseover", (event) => this.#pointed(event));
    pane.addEventListener("mouseleave", () => this.#inspect());
    pane.addEventListener("focusin", (event) => this.#focused(event));
    pane.addEventListener("scroll", () => {
      this.following = this.view.about.grows && pane.scrollTop + pane.clientHeight > pane.scrollHeight - 80;
      this.looking ??= requestAnimationFrame(() => this.#markTurn());
    });
  }

  #nothing() {
    fill(this.parts.pane, h("p", { class: "empty" }, this.view.about.grows ? "No turn is recorded yet." : "This session has no turns."));
    this.#drawHead();
    bindKeys(sessionKeys(this));
  }

  async #load() {
    this.trajectory = new Trajectory(await getPacked(sessionPath(this.id, "leaves", this.leaf), {}, this.view.signal));
    this.comparisons = new Map();
    this.#show();
    const { token, turn } = this.address;
    if (token !== null && token < this.trajectory.length) this.choose(token);
    else if (turn !== null) this.toTurn(this.trajectory.about.turns.findIndex((one) => one.seq === turn));
    else if (this.mode === "conversation") this.#toFirstSampled();
    bindKeys(sessionKeys(this));
    await this.#compare();
  }

  /** Scroll to the first sampled token, unless it is in view. */
  #toFirstSampled() {
    const i = this.trajectory.provenance.indexOf(SAMPLED);
    const element = i < 0 ? null : this.record.pane.element(i);
    if (element && !this.record.pane.sees(element)) this.record.reveal(i);
  }

  #markTurn() {
    this.looking = null;
    const turn = this.record && this.trajectory.about.turns[this.record.turnInView()];
    if (!turn) return;
    markTurn(this.parts.tree, turn.seq);
    this.finder.inView(turn.seq);
  }

  /** Draw the trajectory, alone or side by side. */
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
    } else if (comparison) {
      this.compared = new ComparisonView(this.parts.pane, this.trajectory, comparison);
    } else {
      fill(this.parts.pane, h("p", { class: "empty" }, "Comparing…"));
    }
    this.shown?.pane.select(this.selection);
    this.#drawHead();
    this.#drawTools();
    this.#drawTree();
    this.#drawMap();
    this.#inspect();
  }

  /** Compare with the chosen side, unless that is done or running, and show the result. */
  async #compare() {
    const { side, comparisons } = this;
    if (side === null || comparisons.has(side)) return;
    comparisons.set(side, null);
    this.problem = null;
    let problem = null;
    try {
      const path = sessionPath(this.id, "leaves", this.leaf, "comparison");
      comparisons.set(side, new Comparison(await getPacked(path, { with: side }, this.view.signal)));
    } catch (error) {
      comparisons.delete(side);
      if (!(error instanceof Refused) || error.status === 401) {
        this.view.failed(error);
        return;
      }
      problem = error.message;
    }
    // Meanwhile the session may have grown, or the user may have chosen a different side.
    if (side !== this.side || comparisons !== this.comparisons) return;
    this.problem = problem;
    this.#showComparison();
  }

  #showComparison() {
    if (this.beside && this.problem) fill(this.parts.pane, h("p", { class: "empty", role: "alert" }, this.problem));
    else if (this.beside) this.#show();
    else {
      this.record.setComparison(this.comparisons.get(this.side) ?? null);
      this.#drawTools();
      this.#drawMap();
      this.#inspect();
    }
  }

  #drawHead() {
    document.title = `${this.id} · Tokentape`;
    const leaf = this.tree.leaves.find((one) => one.turn === this.leaf);
    drawHead(this.parts.head, { tree: this.tree, leaf, grows: this.view.about.grows, toNeighbour: (by) => this.toNeighbour(by) });
  }

  /** Go to the session `by` places further in the list, which handles keys that are pressed meanwhile. */
  async toNeighbour(by) {
    holdKeys();
    try {
      const side = this.beside && otherOf(this.side) !== undefined ? this.side : undefined;
      if (!(await toNeighbour(this.id, by, this.view.query, this.view.signal, side))) bindKeys(sessionKeys(this));
    } catch (error) {
      this.view.failed(error);
    }
  }

  #drawTools() {
    const { mode, side, tree, problem } = this;
    const comparison = this.comparisons.get(side);
    this.sides = sidesOf(this);
    drawTools(this.parts.tools, { mode, side, sides: this.sides, others: otherSessions(tree, this.view.about), comparison, problem }, this);
  }

  /** Show the tree over the tokens, in a narrow window. */
  showTree(shown = !this.parts.tree.classList.contains("shown")) {
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

  /** Show details of a token, of the chosen token, or of a token in `other`. */
  #inspect(i = this.selection?.i, other = null) {
    const { inspector } = this.parts;
    if (!this.trajectory || i === undefined) {
      fill(inspector, h("h2", {}, "Token"), h("p", { class: "dim" }, "Point at a token, or choose one: ", h("kbd", {}, "→"), " the next, ", h("kbd", {}, "n"), " the next difference, ", h("kbd", {}, "?"), " all keys."));
      return;
    }
    const pinned = !other && this.selection !== null && i === this.selection.i;
    const at = pinned ? { ...this.selection, pinned } : { i, from: i, to: i + 1, pinned };
    const comparison = this.comparisons.get(this.side);
    const change = other ? null : comparison?.changeAt(i);
    const { session_id: id, leaf } = (other ?? this.trajectory).about;
    inspect(inspector, other ?? this.trajectory, at, change ? comparison.describe(change) : null, {
      permalink: () => (other ? new URL(link({ id, leaf, token: i }), location.href).href : this.permalink(i)),
      alternatives: (turn) => this.alternatives.of(id, turn),
    });
  }

  /** Choose a token, or a range up to it, bring it into view, and put it into the URL. */
  choose(i, { extend = false, quiet = false } = {}) {
    if (!this.trajectory.length) return;
    i = Math.max(0, Math.min(this.trajectory.length - 1, i));
    const anchor = extend && this.selection ? this.selection.anchor : i;
    this.selection = { i, anchor, from: Math.min(i, anchor), to: Math.max(i, anchor) + 1 };
    const { shown } = this;
    if (shown) {
      shown.open(i);
      const element = shown.pane.element(i);
      shown.pane.select(this.selection);
      if (!quiet && !(element && shown.pane.sees(element))) shown.reveal(i);
      this.moving = true;
      (element ?? this.parts.pane).focus({ preventScroll: true });
      this.moving = false;
    }
    this.#tell();
    this.#drawMap();
    this.#inspect();
  }

  /** Put what is shown into the URL after a delay, because browsers limit URL changes while a key repeats. */
  #tell() {
    if (this.view.signal.aborted) return;
    clearTimeout(this.telling);
    const { hash } = location;
    this.telling = setTimeout(() => {
      // Unless the page is already changing to a different view.
      if (location.hash === hash) history.replaceState(null, "", this.#link({ token: this.selection?.i }));
    }, 80);
  }

  clear() {
    this.showTree(false);
    this.selection = null;
    this.shown?.pane.select(null);
    this.#tell();
    this.parts.pane.focus({ preventScroll: true });
    this.#drawMap();
    this.#inspect();
  }

  #clicked(event) {
    const token = event.target.closest?.(".row [data-i], .recorded [data-i]");
    if (!token || String(getSelection())) return;
    this.choose(Number(token.dataset.i), { extend: event.shiftKey, quiet: true });
  }

  #pointed(event) {
    const token = event.target.closest?.("[data-i]");
    if (!token) return;
    const { recorded, other } = this.comparisons.get(this.side) ?? {};
    if (!token.closest(".other")) this.#inspect(Number(token.dataset.i));
    else if (recorded) this.#inspect(Number(token.dataset.i), other);
  }

  #focused(event) {
    const token = event.target.closest?.(".row [data-i]");
    if (token && !this.moving && Number(token.dataset.i) !== this.selection?.i) this.choose(Number(token.dataset.i), { quiet: true });
  }

  toTurn(n) {
    const turn = this.trajectory.about.turns[n];
    if (turn) this.choose(turn.start);
  }

  /** Go to a turn by its number, on whichever branch it is. */
  #toTurnNumber(seq) {
    const n = this.trajectory?.about.turns.findIndex((one) => one.seq === seq) ?? -1;
    const leaf = this.tree.leaves.find((one) => one.path.includes(seq));
    if (n >= 0) this.#chooseInRecord(this.trajectory.about.turns[n].start);
    else if (leaf) location.hash = this.#link({ leaf: leaf.turn, turn: seq });
    else say(`No branch has a turn ${seq}`);
  }

  #chooseInRecord(i) {
    if (this.beside) this.setMode("conversation");
    this.choose(i);
  }

  toNext(places, by, what) {
    const here = this.selection?.i ?? -1;
    const next = by > 0 ? places.find((place) => place > here) : places.findLast((place) => place < here);
    if (next === undefined) say(places.length ? `No ${by > 0 ? "more" : "earlier"} ${what}` : `There is no ${what}`);
    else this.choose(next);
  }

  toChange(by) {
    const changes = this.comparisons.get(this.side)?.changes ?? [];
    if (!this.beside) {
      this.toNext(changes.map((change) => Math.min(change.start, this.trajectory.length - 1)), by, "difference");
      return;
    }
    const start = this.compared?.toChange(by);
    if (start === undefined) say("No more differences");
    else this.choose(start, { quiet: true });
  }

  setMode(mode) {
    if (mode === this.mode || (mode === "beside" && this.side === null)) return;
    const turn = this.record?.turnInView() ?? 0;
    this.mode = mode;
    this.#tell();
    this.#show();
    if (this.record && this.selection) this.choose(this.selection.i);
    else this.record?.sections[turn]?.scrollIntoView();
    this.#compare();
  }

  setSide(side) {
    this.side = side;
    this.problem = null;
    this.#tell();
    this.#showComparison();
    this.#compare();
  }

  /** The full URL of a token, or of the branch. */
  permalink(token) {
    return new URL(this.#link({ token }), location.href).href;
  }

  #link({ leaf = this.leaf, turn, token }) {
    const side = this.side === this.view.about.against[0] ? null : this.side;
    const mode = this.mode === "conversation" ? null : this.mode;
    return link({ id: this.id, leaf, turn, token, side, mode, list: String(this.view.query) });
  }

  otherSide() {
    const { sides } = this;
    if (sides.length > 1) this.setSide(sides[(sides.indexOf(this.side) + 1) % sides.length]);
    say(this.side ? `Compared with: ${sideName(this.side)}` : "Nothing to compare with");
  }

  #watch() {
    let changed = performance.now();
    poll(this.view, OFTEN, async () => {
      try {
        if (await this.#refresh()) changed = performance.now();
      } catch (error) {
        // The tree loaded but the tokens did not: load both again.
        this.etag = null;
        throw error;
      }
      return performance.now() - changed > QUIET ? SELDOM : OFTEN;
    });
  }

  /** Take what is new; whether there was anything. */
  async #refresh() {
    if (!(await this.#loadTree())) return false;
    // What continues the branch that is shown: where several do, the one that is not a fork.
    const onward = this.tree.leaves.find((one) => one.path.includes(this.leaf));
    if (onward === undefined || !this.trajectory) {
      // The first turn, or another session of the same id.
      this.leaf = leafOf(this.tree, { leaf: null, turn: null });
      if (this.leaf !== null) await this.#load();
      return true;
    }
    const follow = this.following;
    this.leaf = onward.turn;
    const packed = await getPacked(sessionPath(this.id, "leaves", this.leaf), { from: this.trajectory.length }, this.view.signal);
    this.trajectory = this.trajectory.grownBy(packed);
    this.comparisons = new Map();
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
    clearTimeout(this.telling);
    cancelAnimationFrame(this.looking);
    this.record?.close();
    this.compared?.close();
    this.minimap.close();
  }
}
