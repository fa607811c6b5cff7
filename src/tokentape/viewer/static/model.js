// Token sequences: bytes, tokens that are parts of one character, and what is known about each token.

import { count } from "./dom.js";

export const SAMPLED = 1;

export const CONTROL = 1;
export const UNKNOWN = 2;
export const LETTERS = 4;

/** The approximate number of tokens in a block of the page. */
const BLOCK = 512;

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Ids with their texts: the record, or a different tokenization of it. */
export class Tokens {
  /**
   * @param {Int32Array} ids
   * @param {Int32Array | undefined} ends offset after each token's last byte
   * @param {Uint8Array | undefined} text
   * @param {Uint8Array | undefined} marks
   */
  constructor(ids, ends, text, marks) {
    this.ids = ids;
    this.ends = ends;
    this.text = text;
    this.marks = marks ?? new Uint8Array(ids.length);
    this.joined = ends ? joins(ends, text, this.marks) : new Uint8Array(ids.length);
  }

  get length() {
    return this.ids.length;
  }

  get hasText() {
    return this.ends !== undefined;
  }

  /** Offset of a token's first byte. */
  byteStart(i) {
    return i ? this.ends[i - 1] : 0;
  }

  /** The bytes of tokens i to j (exclusive). */
  bytes(i, j = i + 1) {
    return this.text.subarray(this.byteStart(i), j ? this.ends[j - 1] : 0);
  }

  /** The text of tokens i to j (exclusive), or ids if there is no text. */
  string(i, j = i + 1) {
    if (!this.hasText) return Array.from(this.ids.subarray(i, j), (id) => `${id} `).join("");
    let text = "";
    // Ids from a different vocabulary have no bytes.
    for (let at = i, from = i; at <= j; at++) {
      if (at === j || this.marks[at] & UNKNOWN) {
        if (at > from) text += decoder.decode(this.bytes(from, at));
        if (at < j) text += `⟨${this.ids[at]}⟩`;
        from = at + 1;
      }
    }
    return text;
  }

  /** Text if the token alone is valid UTF-8, else null. */
  whole(i) {
    try {
      return strict.decode(this.bytes(i));
    } catch {
      return null;
    }
  }

  /** The range of tokens that together spell the character of token i: from, to (exclusive). */
  group(i) {
    let from = i;
    let to = i + 1;
    while (this.joined[from]) from--;
    while (to < this.length && this.joined[to]) to++;
    return [from, to];
  }
}

/** A recorded trajectory. */
export class Trajectory extends Tokens {
  constructor({ header, arrays }) {
    super(arrays.token_ids, arrays.text_ends, arrays.text, arrays.marks);
    this.about = header;
    this.provenance = arrays.provenance;
    this.logprobs = arrays.logprobs;
    this.#whole(header, arrays);
    this.markBreaks();
  }

  #whole(header, arrays) {
    this.about = header;
    this.mask = arrays.loss_mask;
    this.columns = header.columns.map((name, n) => ({ name, values: arrays[`column_${n}`] }));
  }

  /** A trajectory that extends this one; `grown` contains what follows its tokens. */
  grownBy({ header, arrays }) {
    const start = this.text ? this.text.length : 0;
    const ends = arrays.text_ends && Int32Array.from(arrays.text_ends, (end) => end + start);
    return new Trajectory({
      header,
      arrays: {
        ...arrays,
        token_ids: joinedArrays(this.ids, arrays.token_ids),
        provenance: joinedArrays(this.provenance, arrays.provenance),
        logprobs: joinedArrays(this.logprobs, arrays.logprobs),
        text_ends: ends && joinedArrays(this.ends, ends),
        text: arrays.text && joinedArrays(this.text, arrays.text),
        marks: arrays.marks && joinedArrays(this.marks, arrays.marks),
      },
    });
  }

  /** Characters never cross the end of a run, because a different writer follows. */
  markBreaks() {
    for (let i = 1; i < this.length; i++) {
      if (this.provenance[i] !== this.provenance[i - 1]) this.joined[i] = 0;
    }
    for (const turn of this.about.turns) if (turn.start < this.length) this.joined[turn.start] = 0;
  }

  /** Index of the turn that a token belongs to, in the order of the path. */
  turnOf(i) {
    return lastAtMost(this.about.turns, i, (turn) => turn.start);
  }

  /** A token's place: its turn, and its number within the turn. */
  place(i) {
    const { seq, start, completion_start: sampled } = this.about.turns[this.turnOf(i)];
    return `${seq}, ${i < sampled ? "added" : "sampled"} token ${count(i - (i < sampled ? start : sampled))}`;
  }

  /** The weights that sampled a token, or null if it was not sampled. */
  weightOf(i) {
    const at = lastAtMost(this.about.weight_spans, i, (span) => span[0]);
    return at >= 0 && i < this.about.weight_spans[at][1] ? this.about.weight_spans[at][2] : null;
  }

  /** The first token after each change of weights. */
  weightBoundaries() {
    const spans = this.about.weight_spans;
    return spans.filter((span, n) => n > 0 && span[2] !== spans[n - 1][2]).map(([start, , version]) => ({ start, version }));
  }

  provenanceName(i) {
    return this.about.provenance_names[this.provenance[i]] ?? `code ${this.provenance[i]}`;
  }

  /**
   * The pieces for the page: runs of one provenance within each turn, with long runs split.
   * @returns {{turn: number, start: number, end: number, code: number, first: boolean}[]}
   */
  pieces(fromTurn = 0) {
    const found = [];
    this.about.turns.forEach((turn, n) => {
      if (n < fromTurn) return;
      for (let start = turn.start; start < turn.end; ) {
        const code = this.provenance[start];
        let end = start + 1;
        while (end < turn.end && this.provenance[end] === code) end++;
        for (let at = start; at < end; ) {
          const stop = this.#cut(at, end);
          found.push({ turn: n, start: at, end: stop, code, first: at === start });
          at = stop;
        }
        start = end;
      }
    });
    return found;
  }

  /** Where to split a long run: after a nearby newline if possible, never within a character. */
  #cut(start, end) {
    if (end - start <= BLOCK + BLOCK / 4) return end;
    if (this.hasText) {
      for (let at = start + BLOCK; at > start + BLOCK / 2; at--) {
        if (this.text[this.ends[at - 1] - 1] === 10) return at;
      }
    }
    let at = start + BLOCK;
    while (at < end && this.joined[at]) at++;
    return at;
  }
}

/** Group pieces into blocks of about the wanted number of tokens. A block belongs to one turn. */
export function blocks(pieces) {
  const found = [];
  let last = null;
  for (const piece of pieces) {
    const size = piece.end - piece.start;
    if (last && last.turn === piece.turn && last.tokens + size <= BLOCK) {
      last.pieces.push(piece);
      last.tokens += size;
      last.end = piece.end;
    } else {
      last = { turn: piece.turn, start: piece.start, end: piece.end, tokens: size, pieces: [piece] };
      found.push(last);
    }
  }
  return found;
}

/** Index of the last item whose key is at most `value`, or -1. Keys must increase. */
export function lastAtMost(items, value, key) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Eight steps of surprise: -logprob in nats, linear up to 8, which is 1 in 3,000. */
export function surprise(logprob) {
  return Math.max(0, Math.min(7, Math.floor(-logprob)));
}

function joinedArrays(one, other) {
  const both = new one.constructor(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}

/** 1 for each token that continues the previous token's character. */
function joins(ends, text, marks) {
  const found = new Uint8Array(ends.length);
  for (let i = 1; i < ends.length; i++) {
    const start = ends[i - 1];
    if (start === ends[i] || (marks[i] | marks[i - 1]) & (CONTROL | UNKNOWN)) continue;
    if ((text[start] & 0xc0) === 0x80 ? cutBefore(text, start) : goesOn(text, start)) found[i] = 1;
  }
  return found;
}

/** Whether the byte at `at` continues the incomplete character before it. */
function cutBefore(text, at) {
  for (let back = 1; back <= 3 && at - back >= 0; back++) {
    const byte = text[at - back];
    if ((byte & 0xc0) === 0x80) continue;
    const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back;
  }
  return false;
}

/** Whether a new character belongs to the emoji before it: joiners, variation selectors, skin tones. */
function goesOn(text, at) {
  const [a, b, c, d] = text.subarray(at, at + 4);
  if (a === 0xef && b === 0xb8 && c === 0x8f) return true;
  if (a === 0xe2 && b === 0x80 && c === 0x8d) return true;
  if (a === 0xf0 && b === 0x9f && c === 0x8f && d >= 0xbb) return true;
  return at >= 3 && a >= 0xe2 && text[at - 3] === 0xe2 && text[at - 2] === 0x80 && text[at - 1] === 0x8d;
}
