// Details of the token under the pointer, or of the chosen token.

import { getJson, sessionPath } from "./api.js";
import { copy, count, counted, fill, h, real, when } from "./dom.js";
import { CONTROL, LETTERS, SAMPLED, UNKNOWN } from "./model.js";
import { visible } from "./tokens.js";

const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");

/** Ids as a Python list. */
export function pythonList(ids) {
  return `[${Array.from(ids).join(", ")}]`;
}

/** The alternatives of each token, fetched per turn on first use. */
export class Alternatives {
  #known = new Map();

  constructor(view, arrived) {
    this.view = view;
    this.arrived = arrived;
  }

  /** A turn's alternatives: null if they are not recorded, undefined while they load. */
  of(id, { seq, alternatives }) {
    if (!alternatives) return null;
    const path = sessionPath(id, "turns", seq, "alternatives");
    if (!this.#known.has(path)) {
      this.#known.set(path, undefined);
      getJson(path, {}, this.view.signal)
        .then((found) => {
          this.#known.set(path, found.alternatives);
          this.arrived();
        })
        .catch(this.view.failed);
    }
    return this.#known.get(path);
  }
}

/** A table of likely alternatives: null if they are not recorded, undefined while they load. */
function alternativesOf(recorded, within, id) {
  if (recorded === undefined) return "…";
  if (!recorded?.[within]) return h("span", { class: "dim" }, "not recorded");
  const line = ([other, logprob, text]) =>
    h("tr", { class: other === id ? "own" : "" }, h("td", {}, h("bdi", { class: "tokentext" }, text === null ? "" : visible(text) || "∅")), h("td", {}, h("code", {}, other)), h("td", { class: "number" }, real(Math.exp(logprob))));
  return h("table", { class: "alternatives" }, h("caption", { class: "offscreen" }, "Alternatives: text, id, probability"), h("tbody", {}, ...recorded[within].map(line)));
}

/**
 * @param {HTMLElement} place
 * @param {import("./model.js").Trajectory} trajectory
 * @param {{i: number, from: number, to: number, pinned: boolean}} at
 * @param {{class: string, name: string, meaning: string, recorded: boolean, other: string, otherIds: number[]} | null} drift
 * @param {{permalink: () => string, alternatives: (turn: any) => any[] | null | undefined}} page
 */
export function inspect(place, trajectory, at, drift, page) {
  const { i, from, to, pinned } = at;
  const n = trajectory.turnOf(i);
  const turn = trajectory.about.turns[n];
  const sampled = trajectory.provenance[i] === SAMPLED;
  const facts = [];
  const fact = (name, ...value) => facts.push(h("dt", {}, name), h("dd", {}, ...value));

  fact("id", h("code", {}, trajectory.ids[i]));
  if (trajectory.hasText) {
    const bytes = trajectory.bytes(i);
    fact("bytes", h("code", {}, bytes.length > 48 ? `${hex(bytes.subarray(0, 48))} …` : hex(bytes) || "none"), ` (${bytes.length})`);
  }
  fact("offset", `token ${count(i)} of ${count(trajectory.length)}`);
  if (trajectory.hasText) fact("byte", count(trajectory.byteStart(i)));
  const within = i - (i < turn.completion_start ? turn.start : turn.completion_start);
  fact("turn", trajectory.place(i));
  fact("written by", h("span", { class: `swatch p${trajectory.provenance[i]}`, "aria-hidden": "true" }), trajectory.provenanceName(i));
  fact("loss", trajectory.mask[i] ? "trained" : sampled ? "none: an earlier branch trains it" : "none");
  if (sampled) {
    const logprob = trajectory.logprobs[i];
    fact("logprob", real(logprob), h("span", { class: "dim" }, ` p = ${real(Math.exp(logprob))}`));
    fact("weights", trajectory.weightOf(i) ?? "–");
    fact("alternatives", alternativesOf(page.alternatives(turn), within, trajectory.ids[i]));
  }
  for (const { name, values } of trajectory.columns) fact(name, real(values[i]));
  if (trajectory.marks[i] & CONTROL) fact("control", "a control token");
  if (trajectory.marks[i] & LETTERS) fact("control", h("strong", {}, "letters only"), ": these tokens spell a control token and are none");
  if (trajectory.marks[i] & UNKNOWN) fact("text", "the tokenizer does not have this id");
  if (trajectory.joined[i] || (i + 1 < trajectory.length && trajectory.joined[i + 1])) {
    const [start, end] = trajectory.group(i);
    fact("part of", h("span", { class: "tokentext" }, visible(trajectory.string(start, end))), ` (part ${i - start + 1} of ${end - start})`);
  }
  if (drift) {
    fact(drift.recorded ? "differs" : "drift", h("span", { class: "badge drift" }, `≠ ${drift.class}`), h("span", { class: "dim" }, drift.name === drift.class ? ` ${drift.meaning}` : ` ${drift.name}: ${drift.meaning}`));
    fact("other side", h("span", { class: "tokentext" }, drift.other || "nothing"), h("code", {}, ` ${pythonList(drift.otherIds)}`));
  }
  if (turn.engine) fact("engine", turn.engine);
  if (turn.created_at) fact("sampled", when(turn.created_at));

  const selected = to - from;
  const ids = trajectory.ids;
  const text = trajectory.hasText ? visible(trajectory.string(from, Math.min(to, from + 200))) : String(ids[i]);
  fill(
    place,
    h("h2", {}, pinned ? (selected > 1 ? counted(selected, "token") : "Token") : "Token, pointed at"),
    h("div", { class: "tokentext big" }, text.length > 220 ? `${text.slice(0, 220)}…` : text || "∅"),
    h("dl", { class: "facts" }, ...facts),
    h(
      "div",
      { class: "buttons" },
      h("button", { onclick: () => copy(pythonList(ids.subarray(from, to)), counted(selected, "id")) }, selected > 1 ? `Copy ${count(selected)} ids` : "Copy id"),
      h("button", { onclick: () => copy(pythonList(ids.subarray(turn.start, turn.end)), `the ids of turn ${turn.seq}`) }, "Copy turn's ids"),
      h("button", { onclick: () => copy(pythonList(ids.subarray(0, turn.completion_start)), `the prompt of turn ${turn.seq}`) }, "Copy prompt's ids"),
      h("button", { onclick: () => copy(page.permalink(), "the link") }, "Copy link"),
    ),
  );
}
