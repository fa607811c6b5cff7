// Search within a session, and go to a turn.

import { count, h, say } from "./dom.js";

const MOST = 10000;
const latin = new TextDecoder("latin1");

/** Bytes with A to Z in lower case. */
function small(bytes) {
  return Uint8Array.from(bytes, (byte) => (byte >= 65 && byte <= 90 ? byte + 32 : byte));
}

/**
 * The first token of each match of a text. Without a tokenizer, search for an id instead.
 * @param {import("./model.js").Trajectory} trajectory
 */
export function places(trajectory, text) {
  const found = [];
  if (!text) return found;
  if (!trajectory.hasText) {
    trajectory.ids.forEach((id, i) => found.length < MOST && String(id) === text && found.push(i));
    return found;
  }
  // One character per byte, so offsets are byte offsets.
  trajectory.small ??= latin.decode(small(trajectory.text));
  const wanted = latin.decode(small(new TextEncoder().encode(text)));
  let token = 0;
  for (let at = trajectory.small.indexOf(wanted); at >= 0 && found.length < MOST; at = trajectory.small.indexOf(wanted, at + 1)) {
    while (trajectory.ends[token] <= at) token++;
    if (found.at(-1) !== token) found.push(token);
  }
  return found;
}

/**
 * The search fields. `page` has the trajectory and the chosen token, and goes to tokens and turns.
 * @param {{trajectory: () => any, at: () => number, choose: (i: number) => void, toTurn: (seq: number) => void}} page
 */
export class Finder {
  constructor(page) {
    this.page = page;
    this.count = h("span", { class: "dim", "aria-live": "polite" });
    this.field = h("input", {
      id: "find",
      type: "search",
      placeholder: "Find text",
      "aria-label": "Find text",
      spellcheck: "false",
      oninput: () => (this.count.textContent = ""),
      onkeydown: (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1),
    });
    this.turn = h("input", {
      id: "toturn",
      class: "short",
      type: "number",
      min: "0",
      "aria-label": "Go to turn",
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.target.value === "") return;
        page.toTurn(Number(event.target.value));
        event.target.value = "";
      },
    });
    this.element = h("div", { class: "finder" }, this.field, this.count, h("span", { class: "dim", "aria-hidden": "true" }, "turn"), this.turn);
  }

  /** Go to the next or previous match, and wrap around at the ends. */
  next(by) {
    const found = places(this.page.trajectory(), this.field.value);
    if (!found.length) {
      this.count.textContent = "";
      say(this.field.value ? "Not found" : "Nothing to find");
      return;
    }
    const here = this.page.at();
    let n = by > 0 ? found.findIndex((i) => i > here) : found.findLastIndex((i) => i < here);
    if (n < 0) n = by > 0 ? 0 : found.length - 1;
    this.count.textContent = `${count(n + 1)} of ${count(found.length)}${found.length === MOST ? " or more" : ""}`;
    this.page.choose(found[n]);
  }

  /** Show which turn is in view. */
  inView(seq) {
    this.turn.placeholder = String(seq);
  }
}
