// Tokens as elements. A block far outside of the view is plain text, so that the browser's search finds it, and gets an
// element per token when it comes near the view.

import { h } from "./dom.js";
import { CONTROL, LETTERS, SAMPLED, UNKNOWN, lastAtMost, surprise } from "./model.js";

/** Invisible characters, or characters that change the text around them. */
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;
/** The same without joiners and variation selectors, which scripts and emoji need. */
const UNSEEN = new RegExp(`(?![\\u200c\\u200d\\p{Mn}])${INVISIBLE.source}`, "gu");
const SEEN = /[^\s\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}]/u;

/** The characters of a text to spell out: also joiners if there is nothing that they could join. */
const unseenIn = (text) => (SEEN.test(text) ? UNSEEN : INVISIBLE);

function spelled(character) {
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Text with invisible characters spelled out, for one line. */
export function visible(text) {
  return text.replace(unseenIn(text), (character) => (character === "\n" || character === "\t" ? spelled(character) : `⟨${spelled(character)}⟩`));
}

/** Text that can't affect the page around it. Newlines are kept. */
function inert(text) {
  return text.replace(UNSEEN, (character) => (character === "\n" ? "\n" : character === "\t" ? "\t" : "\ufffd"));
}

/** Put a token's text into its element. A final newline is only marked: it follows the element. */
function write(element, text) {
  const unseen = unseenIn(text);
  if (text.search(unseen) < 0) {
    element.append(text);
    return;
  }
  let plain = "";
  const end = text.endsWith("\n") ? text.length - 1 : -1;
  let at = 0;
  for (const character of text) {
    at += character.length;
    if (character.search(unseen) < 0) {
      plain += character;
      continue;
    }
    if (plain) element.append(plain);
    plain = "";
    // The style sheet draws the mark, so copied text does not contain it.
    const kept = (character === "\n" && at - 1 !== end) || character === "\t" ? character : "";
    element.append(h("span", { class: "u", "data-show": spelled(character) }, kept));
  }
  if (plain) element.append(plain);
}

const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");

/**
 * Elements of tokens `start` to before `end`.
 * @param {import("./model.js").Tokens} tokens
 * @param {(i: number) => string} classes the CSS classes of each token's element
 * @param {(i: number) => Node[] | null} before the nodes to put before a token
 */
export function tokenElements(tokens, start, end, classes, before = () => null) {
  const made = document.createDocumentFragment();
  for (let i = start; i < end; ) {
    const [, groupEnd] = tokens.hasText ? tokens.group(i) : [i, i + 1];
    const stop = Math.min(groupEnd, end);
    if (stop - i > 1) {
      made.append(...(before(i) ?? []), groupElement(tokens, i, stop, classes));
    } else {
      made.append(...(before(i) ?? []), tokenElement(tokens, i, classes(i)));
    }
    // After the element, so that it does not extend into the next line; at the end the row breaks the line.
    if (stop < end && endsLine(tokens, stop - 1)) made.append("\n");
    i = stop;
  }
  return made;
}

function endsLine(tokens, i) {
  return tokens.hasText && tokens.ends[i] > tokens.byteStart(i) && tokens.text[tokens.ends[i] - 1] === 10;
}

function tokenElement(tokens, i, classes) {
  const element = document.createElement("span");
  element.className = `t ${classes}`;
  element.dataset.i = i;
  element.tabIndex = -1;
  const marks = tokens.marks[i];
  if (marks & CONTROL) element.classList.add("control");
  if (marks & LETTERS) element.classList.add("letters");
  if (!tokens.hasText || marks & UNKNOWN) {
    element.classList.add("id");
    element.append(String(tokens.ids[i]));
    return element;
  }
  const text = tokens.whole(i);
  if (text === null) {
    element.classList.add("raw");
    element.append(hex(tokens.bytes(i)));
  } else if (text === "") {
    element.classList.add("raw");
    element.append("∅");
  } else {
    write(element, text);
  }
  return element;
}

/** Tokens that are parts of one character: the character once, then each token as bytes. */
function groupElement(tokens, start, end, classes) {
  const group = h("span", { class: "g" });
  const whole = h("span", { class: "whole" });
  write(whole, tokens.string(start, end));
  group.append(whole);
  for (let i = start; i < end; i++) {
    const part = document.createElement("span");
    part.className = `t part ${classes(i)}`;
    part.dataset.i = i;
    part.tabIndex = -1;
    part.append(hex(tokens.bytes(i)));
    group.append(part);
  }
  return group;
}

/** The lanes of a recorded token: provenance, loss, logprob. */
export function laneClasses(trajectory, i) {
  const code = trajectory.provenance[i];
  let classes = `p${code}`;
  if (trajectory.mask[i]) classes += " m";
  if (code === SAMPLED) classes += ` l${surprise(trajectory.logprobs[i])}`;
  return classes;
}

/** A pane of blocks. Blocks near the view have an element per token. */
export class Pane {
  /**
   * @param {HTMLElement} scroller
   * @param {(block: any) => Node} draw
   * @param {(block: any) => Node} plain
   * @param {number} near blocks within this many pixels of the view are drawn
   * @param {string} token selector of its tokens
   */
  constructor(scroller, draw, plain, near = 1600, token = "[data-i]") {
    this.scroller = scroller;
    this.draw = draw;
    this.plain = plain;
    this.token = token;
    this.selection = null;
    this.blocks = [];
    this.drawn = new Set();
    this.observer = new IntersectionObserver((seen) => this.#moved(seen), { root: scroller, rootMargin: `${near}px 0px` });
  }

  /** Add a block to an element of the pane; blocks are in the order of their tokens. */
  add(parent, block, height) {
    const element = h("div", { class: "block" });
    element.style.setProperty("contain-intrinsic-size", `auto ${Math.round(height)}px`);
    element.append(this.plain(block));
    element.block = block;
    block.element = element;
    this.blocks.splice(lastAtMost(this.blocks, block.start, (one) => one.start) + 1, 0, block);
    parent.append(element);
    this.observer.observe(element);
  }

  /** Remove a block. */
  remove(block) {
    this.observer.unobserve(block.element);
    this.drawn.delete(block);
    this.blocks.splice(this.blocks.indexOf(block), 1);
    block.element.remove();
  }

  /** Redraw a changed block, if it is drawn. */
  redraw(block) {
    if (!this.drawn.has(block)) return;
    block.element.replaceChildren(this.draw(block));
    if (this.selection) this.#mark(block);
  }

  /** Mark tokens as chosen; `i` is the token that keys move from. */
  select(selection) {
    const before = this.selection;
    this.selection = selection;
    for (const block of this.drawn) if ([before, selection].some((one) => one && block.start < one.to && block.end > one.from)) this.#mark(block);
  }

  #mark(block) {
    const { i, from, to } = this.selection ?? {};
    for (const element of block.element.querySelectorAll(this.token)) {
      const n = Number(element.dataset.i);
      element.classList.toggle("in", n >= from && n < to);
      element.classList.toggle("at", n === i);
    }
  }

  redrawAll() {
    for (const block of this.drawn) this.redraw(block);
  }

  /** A token's element, drawn if needed; null if the token is folded. */
  element(i) {
    const block = this.blockOf(i);
    if (!block) return null;
    this.show(block);
    return this.drawnElement(i);
  }

  /** A token's element, if it is drawn. */
  drawnElement(i) {
    const block = this.blockOf(i);
    return block && this.drawn.has(block) ? block.element.querySelector(`${this.token}[data-i="${i}"]`) : null;
  }

  blockOf(i) {
    const block = this.blocks[lastAtMost(this.blocks, i, (one) => one.start)];
    return block && i < block.end ? block : null;
  }

  /** Whether an element is well within the view. */
  sees(element) {
    const one = element.getBoundingClientRect();
    const all = this.scroller.getBoundingClientRect();
    return one.top >= all.top + 40 && one.bottom <= all.bottom - 20;
  }

  /** Bring a token into the middle of the view. */
  reveal(i) {
    const block = this.blockOf(i);
    if (block) this.center(block, () => this.element(i));
  }

  /** Bring the element that `find` returns for a block into the middle of the view. */
  center(block, find) {
    let before = null;
    let left = 10;
    const look = () => {
      this.show(block);
      find()?.scrollIntoView({ block: "center", inline: "nearest" });
      const { scrollTop } = this.scroller;
      // Blocks that come near are drawn now and may be higher than estimated, which moves this block.
      if (scrollTop !== before && left-- > 0) requestAnimationFrame(() => requestAnimationFrame(look));
      before = scrollTop;
    };
    look();
  }

  close() {
    this.observer.disconnect();
  }

  /** Draw a block unless it is drawn. */
  show(block) {
    if (this.drawn.has(block)) return;
    this.drawn.add(block);
    this.redraw(block);
  }

  #moved(seen) {
    for (const { target, isIntersecting } of seen) {
      const { block } = target;
      if (isIntersecting) {
        this.show(block);
      } else if (this.drawn.has(block) && !target.contains(document.activeElement)) {
        this.drawn.delete(block);
        target.replaceChildren(this.plain(block));
      }
    }
  }
}

/** Tokens as plain text, without a final newline, which the row already makes. */
export function plainText(tokens, start, end) {
  return inert(tokens.string(start, end)).replace(/\n$/, "");
}
