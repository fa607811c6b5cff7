// Compare a branch with a second branch or tokenization, side by side, aligned, with differences marked.

import { link, otherOf } from "./address.js";
import { count, counted, fill, h, real } from "./dom.js";
import { Tokens, Trajectory, lastAtMost } from "./model.js";
import { Pane, laneClasses, tokenElements, visible } from "./tokens.js";
import { verdictBadge } from "./tree.js";

/** The number of equal tokens that are shown on each side of a difference. */
const AROUND = 12;
/** How many more equal tokens a click shows. */
const MORE = 400;
/** The maximum number of tokens per side in a row of a difference. */
const CUT = 100;
/** Rows with about this many tokens are drawn together; the estimated number of tokens per line. */
const DRAWN = 200;
const LINE_TOKENS = 12;
/** Rows within this many pixels of the view are drawn. */
const NEAR = 200;
/** The number of tokens from the other side that the inspector shows. */
const SHOWN = 60;

/** What the record was compared with. */
export class Comparison {
  constructor({ header, arrays }) {
    this.about = header;
    const other = Object.fromEntries(Object.entries(arrays).map(([name, array]) => [name.replace("other_", ""), array]));
    // A recorded side has lanes too.
    this.recorded = header.other !== undefined;
    this.other = this.recorded ? new Trajectory({ header: header.other, arrays: other }) : new Tokens(other.token_ids, other.text_ends, other.text, other.marks);
    this.segments = [];
    arrays.differs.forEach((differs, n) => {
      const [start, end, otherStart, otherEnd] = arrays.segments.subarray(4 * n, 4 * n + 4);
      this.segments.push({ start, end, otherStart, otherEnd, difference: differs ? header.differences[differs - 1] : null });
    });
    this.changes = this.segments.filter((segment) => segment.difference);
  }

  /** The change that contains a recorded token, or null. */
  changeAt(i) {
    const n = lastAtMost(this.changes, i, (change) => change.start);
    const change = this.changes[n];
    // Show a stretch that only the other side has at the place where it would be.
    return change && (i < change.end || (change.start === change.end && change.start === i)) ? change : null;
  }

  /** The details that the inspector shows. */
  describe(change) {
    const until = Math.min(change.otherEnd, change.otherStart + SHOWN);
    const cut = until < change.otherEnd ? " …" : "";
    return {
      ...change.difference,
      recorded: this.recorded,
      other: visible(this.other.string(change.otherStart, until)) + cut,
      otherIds: Array.from(this.other.ids.subarray(change.otherStart, until)),
    };
  }

  /** Summarize the comparison in one line. */
  summary(trajectory) {
    const { changed_tokens: tokens, changed_trained_tokens: trained } = this.about;
    const [first] = this.changes;
    if (!first) return this.recorded ? "no difference: both have the same ids" : "no difference: the result has the same ids";
    if (!this.recorded) return `${counted(this.changes.length, "difference")}: ${counted(tokens, "token")} changed, ${count(trained)} of them trained`;
    const where = first.start < trajectory.length ? `turn ${trajectory.place(first.start)}` : "the end of the left side";
    const there = this.changes.reduce((sum, one) => sum + one.otherEnd - one.otherStart, 0);
    return (
      `They differ from ${where} on, after ${counted(first.start, "equal token")}: ${counted(this.changes.length, "difference")}, ` +
      `${count(tokens)} of ${counted(trajectory.length, "token")} on the left and ${count(there)} of ${count(this.other.length)} on the right`
    );
  }

  /** The number of differences per class, most frequent first. */
  classes() {
    const found = new Map();
    for (const { difference } of this.changes) found.set(difference.class, (found.get(difference.class) ?? 0) + 1);
    return [...found].sort((a, b) => b[1] - a[1]);
  }
}

/** The name of the side that the record is compared with. */
export function sideName(side) {
  const other = otherOf(side);
  const leaf = /^leaf-(\d+)/.exec(side);
  const names = [other !== undefined && `session ${other}`, leaf && `branch to turn ${leaf[1]}`].filter(Boolean);
  return names.join(", ") || { retokenized: "text tokenized again", rerendered: "messages rendered again" }[side];
}

/** Shows both sides in one row per stretch. Only rows near the view have elements. */
export class ComparisonView {
  constructor(place, trajectory, comparison) {
    this.trajectory = trajectory;
    this.comparison = comparison;
    this.rows = comparison.segments.flatMap((segment, n) => rowsOf(comparison.segments, segment, n));
    this.at = null;
    const rows = h("div", { class: "rows" });
    fill(
      place,
      h("p", { class: "summary" }, comparison.summary(trajectory), ...comparison.classes().map(([name, times]) => h("span", { class: "badge drift" }, `≠ ${name} ${times}`))),
      h("div", { class: "sides head" }, h("span", { class: "what" }), ...(comparison.recorded ? [trajectory, comparison.other].map(({ about }, n) => h("h3", {}, ...this.#named(about, n === 1))) : [h("h3", {}, "Recorded"), h("h3", {}, sideName(comparison.about.with))])),
      rows,
    );
    this.pane = new Pane(place, (block) => this.#drawn(block), () => document.createDocumentFragment(), NEAR, ".recorded [data-i]");
    for (let n = 0; n < this.rows.length; ) {
      const some = [];
      let lines = 0;
      while (n < this.rows.length && lines < DRAWN / LINE_TOKENS) {
        const row = this.rows[n++];
        lines += row.folded ? 1 : 1 + Math.max(row.end - row.start, row.otherEnd - row.otherStart) / LINE_TOKENS;
        some.push(row);
      }
      this.pane.add(rows, { start: some[0].start, end: some.at(-1).end, rows: some }, 34 * lines);
    }
  }

  /** Name a recorded side by what distinguishes it from the other side. */
  #named({ session_id: id, leaf, reward, verdict }, linked) {
    const branch = `branch to turn ${leaf}`;
    const others = otherOf(this.comparison.about.with) !== undefined;
    const name = others ? h("bdi", { title: branch }, id) : branch;
    return [linked ? h("a", { href: link({ id, leaf }) }, name) : name, verdictBadge(verdict), h("span", { class: "badge" }, reward === null ? "no reward" : `reward ${real(reward)}`)];
  }

  /** The token that is shown after or before a token. */
  next(i, by) {
    const row = this.#rowOf(i + by);
    return row?.folded && i + by >= row.start + row.shown ? (by > 0 ? row.end : row.start + row.shown - 1) : i + by;
  }

  /** Do nothing: folded tokens stay folded. */
  open() {}

  /** Bring the row of a token into view. */
  reveal(i) {
    this.#center(this.#rowOf(i));
  }

  #rowOf(i) {
    return this.rows.find((row) => row.start <= i && i < row.end);
  }

  #center(row) {
    const block = this.pane.blocks.find((one) => one.rows.includes(row));
    if (block) this.pane.center(block, () => block.element.children[block.rows.indexOf(row)]);
  }

  /** Go to the next or previous difference. Return the recorded token where it begins, or undefined if there is none. */
  toChange(by) {
    const changed = this.rows.filter((row) => row.first);
    const here = changed.indexOf(this.at);
    const next = changed[here < 0 ? (by > 0 ? 0 : changed.length - 1) : here + by];
    if (!next) return undefined;
    const before = this.at;
    this.at = next;
    for (const one of this.pane.blocks) if (one.rows.includes(before) || one.rows.includes(next)) this.pane.redraw(one);
    this.#center(next);
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

  /** A row in place of many equal tokens. Each click shows some of them. */
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
    const { other, recorded } = this.comparison;
    return h(
      "div",
      { class: `sides${difference ? " changed" : ""}${one === this.at ? " at" : ""}`, "data-start": start },
      h("span", { class: "what", title: difference && `${difference.name}: ${difference.meaning}` }, one.first && h("span", { class: "badge drift" }, `≠ ${difference.class}`), one.first && h("span", {}, `token ${count(start)}`)),
      h("div", { class: "side recorded toks" }, tokenElements(this.trajectory, start, end, (i) => laneClasses(this.trajectory, i)), start === end && empty()),
      h("div", { class: "side other toks" }, tokenElements(other, otherStart, otherEnd, recorded ? (i) => laneClasses(other, i) : () => "other"), otherStart === otherEnd && empty()),
    );
  }
}

/** The rows of a stretch. Long differences are split, and the middle of long equal stretches is folded. */
function rowsOf(segments, segment, n) {
  const { start, end, otherStart, otherEnd, difference } = segment;
  if (difference) {
    const parts = Math.max(1, Math.ceil(Math.max(end - start, otherEnd - otherStart) / CUT));
    const cut = (from, to, part) => Math.min(to, from + CUT * part);
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
