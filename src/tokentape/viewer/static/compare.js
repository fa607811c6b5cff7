// The record beside another tokenization of it, aligned by bytes, and where the two differ.

import { count, counted, fill, h } from "./dom.js";
import { Tokens, lastAtMost } from "./model.js";
import { laneClasses, tokenElements, visible } from "./tokens.js";

/** Of an equal stretch so many tokens are shown beside what differs. */
const AROUND = 12;
/** And so many more when somebody asks for them. */
const MORE = 400;
/** Of the other side so many tokens are told beside the tokens. */
const SHOWN = 60;

/** What the record was compared with. */
export class Comparison {
  constructor({ header, arrays }) {
    this.about = header;
    this.other = new Tokens(arrays.other_ids, arrays.other_ends, arrays.other_text, arrays.other_marks);
    this.segments = [];
    arrays.differs.forEach((differs, n) => {
      const [start, end, otherStart, otherEnd] = arrays.segments.subarray(4 * n, 4 * n + 4);
      this.segments.push({ start, end, otherStart, otherEnd, told: differs ? header.differences[differs - 1] : null });
    });
    this.changes = this.segments.filter((segment) => segment.told);
  }

  /** The change that a recorded token is part of, null for none. */
  changeAt(i) {
    const n = lastAtMost(this.changes, i, (change) => change.start);
    const change = this.changes[n];
    // A stretch that only the other side has is told where it would stand.
    return change && (i < change.end || (change.start === change.end && change.start === i)) ? change : null;
  }

  /** For the inspector. */
  told(change) {
    const until = Math.min(change.otherEnd, change.otherStart + SHOWN);
    const cut = until < change.otherEnd ? " …" : "";
    return {
      ...change.told,
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
    for (const { told } of this.changes) found.set(told.class, (found.get(told.class) ?? 0) + 1);
    return [...found].sort((a, b) => b[1] - a[1]);
  }
}

/** Draw both sides, a row per stretch. Calls `onPick(i)` with the recorded token that somebody chose. */
export function drawComparison(place, trajectory, comparison, onPick) {
  const name = comparison.about.with === "retokenized" ? "Its text, tokenized again" : "Its messages, rendered again";
  const rows = h("div", { class: "rows" });
  comparison.segments.forEach((segment, n) => rows.append(...segmentRows(trajectory, comparison, segment, n)));
  fill(
    place,
    h("p", { class: "summary" }, comparison.summary(), ...comparison.classes().map(([name, times]) => h("span", { class: "badge drift" }, `≠ ${name} ${times}`))),
    h("div", { class: "sides head", "aria-hidden": "true" }, h("span", {}, ""), h("h3", {}, "Recorded"), h("h3", {}, name)),
    rows,
  );
  rows.addEventListener("click", (event) => {
    const token = event.target.closest?.(".side.recorded [data-i]");
    if (token) onPick(Number(token.dataset.i));
  });
}

function segmentRows(trajectory, comparison, segment, n) {
  const { start, end, otherStart } = segment;
  if (segment.told) return [row(trajectory, comparison, segment, start, end, otherStart, segment.otherEnd)];
  const equal = (from, to) => row(trajectory, comparison, segment, from, to, otherStart + from - start, otherStart + to - start);
  const first = n > 0 ? Math.min(start + AROUND, end) : start;
  const last = n + 1 < comparison.segments.length ? Math.max(end - AROUND, first) : end;
  if (last - first <= 2 * AROUND) return [equal(start, end)];
  const made = [];
  if (first > start) made.push(equal(start, first));
  made.push(folded(first, last, equal));
  if (end > last) made.push(equal(last, end));
  return made;
}

/** A row in place of many equal tokens, which shows some more of them each time. */
function folded(from, to, equal) {
  const element = h("div", { class: "folded" });
  const draw = () => {
    fill(element, h("button", { onclick: open }, `⋯ ${counted(to - from, "equal token")}`));
  };
  const open = () => {
    const stop = Math.min(from + MORE, to);
    element.before(equal(from, stop));
    from = stop;
    if (from === to) element.remove();
    else draw();
  };
  draw();
  return element;
}

function row(trajectory, comparison, segment, start, end, otherStart, otherEnd) {
  const { told } = segment;
  return h(
    "div",
    { class: told ? "sides changed" : "sides", "data-start": start },
    h("span", { class: "what", title: told && `${told.name}: ${told.meaning}` }, told && h("span", { class: "badge drift" }, `≠ ${told.class}`)),
    h("div", { class: "side recorded toks" }, tokenElements(trajectory, start, end, (i) => laneClasses(trajectory, i)), start === end && empty()),
    h("div", { class: "side toks" }, tokenElements(comparison.other, otherStart, otherEnd, () => "other"), otherStart === otherEnd && empty()),
  );
}

function empty() {
  return h("span", { class: "nothing" }, "nothing");
}
