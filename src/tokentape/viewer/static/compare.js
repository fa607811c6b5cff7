// The record beside another tokenization of it, aligned by bytes, and where the two differ.

import { count, counted, fill, h } from "./dom.js";
import { Tokens, lastAtMost } from "./model.js";
import { Pane, laneClasses, tokenElements, visible } from "./tokens.js";

/** Of an equal stretch so many tokens are shown beside what differs. */
const AROUND = 12;
/** How many more a click shows. */
const MORE = 400;
/** So many rows are drawn together; a line of one is thought to have so many tokens. */
const ROWS = 12;
const LINE_TOKENS = 12;
/** Rows within so many pixels of the view are drawn. */
const NEAR = 200;
/** Tokens of the other side that the inspector shows. */
const SHOWN = 60;

/** What the record was compared with. */
export class Comparison {
  constructor({ header, arrays }) {
    this.about = header;
    this.other = new Tokens(arrays.other_ids, arrays.other_ends, arrays.other_text, arrays.other_marks);
    this.segments = [];
    arrays.differs.forEach((differs, n) => {
      const [start, end, otherStart, otherEnd] = arrays.segments.subarray(4 * n, 4 * n + 4);
      this.segments.push({ start, end, otherStart, otherEnd, difference: differs ? header.differences[differs - 1] : null });
    });
    this.changes = this.segments.filter((segment) => segment.difference);
  }

  /** The change that a recorded token is part of, null for none. */
  changeAt(i) {
    const n = lastAtMost(this.changes, i, (change) => change.start);
    const change = this.changes[n];
    // A stretch that only the other side has is shown where it would stand.
    return change && (i < change.end || (change.start === change.end && change.start === i)) ? change : null;
  }

  /** For the inspector. */
  describe(change) {
    const until = Math.min(change.otherEnd, change.otherStart + SHOWN);
    const cut = until < change.otherEnd ? " …" : "";
    return {
      ...change.difference,
      other: visible(this.other.string(change.otherStart, until)) + cut,
      otherIds: Array.from(this.other.ids.subarray(change.otherStart, until)),
    };
  }

  /** In one line. */
  summary() {
    const { changed_tokens: tokens, changed_trained_tokens: trained } = this.about;
    if (!this.changes.length) return "no difference: these very ids come back";
    return `${counted(this.changes.length, "difference")}: ${counted(tokens, "token")} changed, ${count(trained)} of them trained`;
  }

  /** How many differences are of each class, most first. */
  classes() {
    const found = new Map();
    for (const { difference } of this.changes) found.set(difference.class, (found.get(difference.class) ?? 0) + 1);
    return [...found].sort((a, b) => b[1] - a[1]);
  }
}

/** What is beside the record. */
export function sideName(side) {
  if (side.startsWith("leaf-")) return `branch to turn ${side.slice(5)}`;
  return { retokenized: "text tokenized again", rerendered: "messages rendered again" }[side];
}

/** Both sides, a row per stretch; only rows near the view have elements. Calls `onPick(i)` with a recorded token. */
export class ComparisonView {
  constructor(place, trajectory, comparison, onPick) {
    this.trajectory = trajectory;
    this.comparison = comparison;
    this.rows = comparison.segments.flatMap((segment, n) => rowsOf(comparison.segments, segment, n));
    this.at = null;
    const rows = h("div", { class: "rows" });
    fill(
      place,
      h("p", { class: "summary" }, comparison.summary(), ...comparison.classes().map(([name, times]) => h("span", { class: "badge drift" }, `≠ ${name} ${times}`))),
      h("div", { class: "sides head", "aria-hidden": "true" }, h("span", {}, ""), h("h3", {}, "Recorded"), h("h3", {}, sideName(comparison.about.with))),
      rows,
    );
    this.pane = new Pane(place, (block) => this.#drawn(block), () => document.createDocumentFragment(), NEAR);
    for (let n = 0; n < this.rows.length; n += ROWS) {
      const some = this.rows.slice(n, n + ROWS);
      const lines = some.reduce((sum, row) => sum + (row.folded ? 1 : 1 + (row.end - row.start) / LINE_TOKENS), 0);
      this.pane.add(rows, { start: some[0].start, end: some.at(-1).end, rows: some }, 34 * lines);
    }
    rows.addEventListener("click", (event) => {
      const token = event.target.closest?.(".side.recorded [data-i]");
      if (token) onPick(Number(token.dataset.i));
    });
  }

  /** Go to the next difference, or to the one before; the recorded token where it begins, undefined if there is none. */
  toChange(by) {
    const changed = this.rows.filter((row) => row.first);
    const here = changed.indexOf(this.at);
    const next = changed[here < 0 ? (by > 0 ? 0 : changed.length - 1) : here + by];
    if (!next) return undefined;
    const block = this.pane.blocks.find((one) => one.rows.includes(next));
    const before = this.at;
    this.at = next;
    for (const one of this.pane.blocks) if (one.rows.includes(before)) this.pane.redraw(one);
    this.pane.show(block);
    this.pane.redraw(block);
    this.pane.center(block, () => block.element.children[block.rows.indexOf(next)]);
    return next.start;
  }

  close() {
    this.pane.close();
  }

  #drawn(block) {
    const made = document.createDocumentFragment();
    made.append(...block.rows.map((one) => (one.folded ? this.#folded(block, one) : this.#row(one, one.start, one.end, one.otherStart, one.otherEnd))));
    return made;
  }

  /** A row in place of many equal tokens, which shows some more of them each time. */
  #folded(block, one) {
    const element = h("div", {});
    const until = Math.min(one.start + one.shown, one.end);
    const more = () => {
      one.shown += MORE;
      this.pane.redraw(block);
    };
    if (one.shown) element.append(this.#row(one, one.start, until, one.otherStart, one.otherStart + until - one.start));
    if (until < one.end) element.append(h("div", { class: "folded" }, h("button", { onclick: more }, `⋯ ${counted(one.end - until, "equal token")}`)));
    return element;
  }

  #row(one, start, end, otherStart, otherEnd) {
    const { difference } = one;
    return h(
      "div",
      { class: `sides${difference ? " changed" : ""}${one === this.at ? " at" : ""}`, "data-start": start },
      h("span", { class: "what", title: difference && `${difference.name}: ${difference.meaning}` }, one.first && h("span", { class: "badge drift" }, `≠ ${difference.class}`)),
      h("div", { class: "side recorded toks" }, tokenElements(this.trajectory, start, end, (i) => laneClasses(this.trajectory, i)), start === end && empty()),
      h("div", { class: "side toks" }, tokenElements(this.comparison.other, otherStart, otherEnd, () => "other"), otherStart === otherEnd && empty()),
    );
  }
}

/** The rows of a stretch: long differences are cut, of long equal stretches the middle is folded. */
function rowsOf(segments, segment, n) {
  const { start, end, otherStart, otherEnd, difference } = segment;
  if (difference) {
    const parts = Math.max(1, Math.ceil(Math.max(end - start, otherEnd - otherStart) / MORE));
    const cut = (from, to, part) => from + Math.floor(((to - from) * part) / parts);
    return Array.from({ length: parts }, (_, part) => ({
      difference,
      first: part === 0,
      start: cut(start, end, part),
      end: cut(start, end, part + 1),
      otherStart: cut(otherStart, otherEnd, part),
      otherEnd: cut(otherStart, otherEnd, part + 1),
    }));
  }
  const equal = (from, to) => ({ start: from, end: to, otherStart: otherStart + from - start, otherEnd: otherStart + to - start });
  const first = n > 0 ? Math.min(start + AROUND, end) : start;
  const last = n + 1 < segments.length ? Math.max(end - AROUND, first) : end;
  if (last - first <= 2 * AROUND) return [equal(start, end)];
  const folded = { ...equal(first, last), folded: true, shown: 0 };
  return [first > start && equal(start, first), folded, end > last && equal(last, end)].filter(Boolean);
}

function empty() {
  return h("span", { class: "nothing" }, "nothing");
}
