// The recorded trajectory as rows of tokens: a heading per turn, a row per run of one writer, lanes under each token.

import { count, h, real } from "./dom.js";
import { blocks, lastAtMost } from "./model.js";
import { Pane, laneClasses, plainText, tokenElements, visible } from "./tokens.js";
import { CAUSES } from "./tree.js";

const LINE = 31;
const LETTER = 8.6;
/** What the conversation view folds: template, system, tool. */
const FOLDED = new Set([2, 3, 5]);
/** The number of folded tokens that are read for a preview. */
const PREVIEW = 60;

export class RecordView {
  /**
   * @param {HTMLElement} place scrolls
   * @param {import("./model.js").Trajectory} trajectory
   * @param {{turnLink: (turn: number) => string}} page
   * @param {boolean} folding whether text other than what user and assistant said is folded
   */
  constructor(place, trajectory, page, folding) {
    this.place = place;
    this.page = page;
    this.comparison = null;
    this.pane = new Pane(place, (block) => this.#drawn(block), (block) => this.#plain(block));
    this.folding = folding;
    this.folds = [];
    this.sections = [];
    this.#take(trajectory);
    this.#append(0);
  }

  /** Show the tokens that the trajectory has grown by. */
  grow(trajectory) {
    const known = this.sections.length;
    this.#take(trajectory);
    this.#append(known);
    for (let n = 0; n < known; n++) this.sections[n].lastChild.replaceWith(this.#foot(n));
    this.pane.redrawAll();
  }

  setComparison(comparison) {
    this.comparison = comparison;
    this.pane.redrawAll();
  }

  /** Unfold the part that contains a token. */
  open(i) {
    const fold = this.#foldOf(i);
    if (fold) this.#toggle(fold);
  }

  /** The token that is shown after or before a token. */
  next(i, by) {
    const fold = this.#foldOf(i + by);
    return fold ? (by > 0 ? fold.end : fold.start - 1) : i + by;
  }

  /** Bring a token, or the fold that contains it, into view. */
  reveal(i) {
    const fold = this.#foldOf(i);
    if (fold) fold.element.scrollIntoView({ block: "center" });
    else this.pane.reveal(i);
  }

  /** The position in the path of the turn at the top of the view. */
  turnInView() {
    const { top } = this.place.getBoundingClientRect();
    return Math.max(0, lastAtMost(this.sections, top + 60, (section) => section.getBoundingClientRect().top));
  }

  close() {
    this.pane.close();
  }

  #take(trajectory) {
    this.trajectory = trajectory;
    this.boundaries = new Map(trajectory.weightBoundaries().map((one) => [one.start, one.version]));
  }

  #append(fromTurn) {
    const sections = new Map();
    for (const { turn, folded, pieces } of this.#runs(this.trajectory.pieces(fromTurn))) {
      if (!sections.has(turn)) {
        const section = h("section", { class: "turn", "data-turn": this.trajectory.about.turns[turn].seq });
        section.append(this.#head(turn));
        sections.set(turn, section);
      }
      if (folded) sections.get(turn).append(this.#fold(pieces));
      else this.#addBlocks(sections.get(turn), pieces);
    }
    for (let n = fromTurn; n < this.trajectory.about.turns.length; n++) {
      const section = sections.get(n) ?? h("section", { class: "turn" }, this.#head(n));
      section.append(this.#foot(n));
      this.sections.push(section);
      this.place.append(section);
    }
  }

  #addBlocks(parent, pieces) {
    const width = Math.max(this.place.clientWidth - 150, 300);
    const made = blocks(pieces);
    for (const block of made) this.pane.add(parent, block, this.#height(block, width));
    return made;
  }

  /** Group neighboring pieces of a turn that are folded together, or that are shown. */
  #runs(pieces) {
    const runs = [];
    for (const piece of pieces) {
      const folded = this.folding && FOLDED.has(piece.code);
      const last = runs.at(-1);
      if (last && last.turn === piece.turn && last.folded === folded) last.pieces.push(piece);
      else runs.push({ turn: piece.turn, folded, pieces: [piece] });
    }
    return runs;
  }

  #fold(pieces) {
    const [{ start }, { end }] = [pieces[0], pieces.at(-1)];
    const writers = [...new Set(pieces.map((one) => this.trajectory.provenanceName(one.start)))];
    // A caller's text is more informative than the template around it.
    const said = pieces.find((one) => one.code !== 2) ?? pieces[0];
    const preview = visible(this.trajectory.string(said.start, Math.min(said.end, said.start + PREVIEW)));
    const button = h(
      "button",
      { "aria-expanded": "false", onclick: () => this.#toggle(fold) },
      h("span", { class: "foldname" }, writers.join(", ")),
      h("span", { class: "offset" }, `${count(end - start)}`),
      h("bdi", { class: "preview" }, preview.slice(0, 240)),
    );
    const fold = { start, end, pieces, shown: null, element: h("div", { class: `fold p${said.code}` }, button) };
    this.folds.push(fold);
    return fold.element;
  }

  #toggle(fold) {
    const button = fold.element.firstChild;
    if (fold.shown) for (const block of fold.shown) this.pane.remove(block);
    fold.shown = fold.shown ? null : this.#addBlocks(fold.element, fold.pieces);
    button.setAttribute("aria-expanded", String(fold.shown !== null));
  }

  /** The fold that contains a token, or null if the token is shown. */
  #foldOf(i) {
    const fold = this.folds[lastAtMost(this.folds, i, (one) => one.start)];
    return fold && i < fold.end && !fold.shown ? fold : null;
  }

  #height(block, width) {
    let height = 0;
    for (const { start, end } of block.pieces) {
      const bytes = this.trajectory.hasText ? this.trajectory.bytes(start, end) : null;
      let lines = 1;
      if (bytes) for (const byte of bytes) if (byte === 10) lines++;
      const letters = bytes ? bytes.length : 6 * (end - start);
      height += LINE * (lines + Math.floor((letters * LETTER) / width)) + 4;
    }
    return height;
  }

  #plain(block) {
    const made = document.createDocumentFragment();
    for (const piece of block.pieces) {
      made.append(this.#row(piece, document.createTextNode(plainText(this.trajectory, piece.start, piece.end))));
    }
    return made;
  }

  #drawn(block) {
    const made = document.createDocumentFragment();
    for (const piece of block.pieces) {
      const elements = tokenElements(
        this.trajectory,
        piece.start,
        piece.end,
        (i) => this.#classes(i),
        (i) => this.#before(i),
      );
      made.append(this.#row(piece, elements));
    }
    return made;
  }

  #row(piece, content) {
    const name = this.trajectory.provenanceName(piece.start);
    return h(
      "div",
      { class: `row p${piece.code}` },
      h("span", { class: "who" }, h("span", { class: "name" }, piece.first ? name : "⋮"), h("span", { class: "offset" }, count(piece.start))),
      h("div", { class: "toks" }, content),
    );
  }

  #classes(i) {
    const classes = laneClasses(this.trajectory, i);
    const change = this.comparison?.changeAt(i);
    if (!change) return classes;
    return change.start === change.end ? `${classes} gap` : `${classes} d`;
  }

  #before(i) {
    const found = [];
    const version = this.boundaries.get(i);
    if (version !== undefined) found.push(h("span", { class: "boundary", "data-show": `weights ${version}`, title: `from here on weights ${version}` }));
    const change = this.comparison?.changeAt(i);
    if (change && change.start === i) found.push(h("span", { class: "driftmark", "data-show": `≠ ${change.difference.class}` }));
    return found.length ? found : null;
  }

  #head(n) {
    const turn = this.trajectory.about.turns[n];
    const facts = [`${count(turn.completion_start - turn.start)} added`, `${count(turn.end - turn.completion_start)} sampled`];
    if (turn.finish_reason) facts.push(`ended by ${turn.finish_reason}${this.#stop(turn)}`);
    facts.push(`weights ${turn.weight_version}`);
    if (turn.mean_logprob !== null) facts.push(`mean logprob ${real(turn.mean_logprob)}`);
    if (turn.reward !== null) facts.push(`reward ${real(turn.reward)}`);
    return h(
      "h3",
      { class: "turnhead" },
      h("a", { href: this.page.turnLink(turn.seq) }, `turn ${turn.seq}`),
      turn.fork && h("span", { class: "badge fork", title: CAUSES[turn.fork] ?? "" }, `↳ fork of ${turn.parent === null ? "the start" : `turn ${turn.parent}`}: ${turn.fork}`),
      h("span", { class: "dim" }, facts.join(" · ")),
      !turn.trained && h("span", { class: "badge" }, "no loss: an earlier branch trains it"),
    );
  }

  /** What ended a turn, as text if possible. */
  #stop({ stop, end }) {
    if (stop === null) return "";
    const spelled = this.trajectory.hasText && this.trajectory.ids[end - 1] === stop ? visible(this.trajectory.string(end - 1, end)) : null;
    return ` ${spelled ?? JSON.stringify(stop)}`;
  }

  #foot(n) {
    const turn = this.trajectory.about.turns[n];
    return h(
      "div",
      { class: "turnfoot" },
      ...turn.left_by.map((one) =>
        h(
          "a",
          { class: `badge ${one.aborted ? "bad" : "fork"}`, href: this.page.turnLink(one.turn), title: CAUSES[one.cause] ?? "" },
          one.aborted ? `✕ turn ${one.turn} was aborted here` : `↳ turn ${one.turn} goes another way from here${one.cause ? `: ${one.cause}` : ""}`,
        ),
      ),
    );
  }
}
