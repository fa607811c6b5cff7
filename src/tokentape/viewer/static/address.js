// A session's URL fragment: `#/session/ID/leaf/3/token/17/with/rerendered/view/beside` and parts of it. `?compare=ID` is
// short for `/with/session-ID/view/beside`.

import { Refused } from "./api.js";

export function parse(parts, query) {
  const compare = query.get("compare");
  query.delete("compare");
  const found = { id: parts[1], ...(compare && { with: `session-${compare}`, view: "beside" }) };
  for (let n = 2; n + 1 < parts.length; n += 2) found[parts[n]] = parts[n + 1];
  const number = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);
  return { id: found.id, leaf: number(found.leaf), turn: number(found.turn), token: number(found.token), side: found.with, mode: found.view };
}

/** The link to an address, without null and undefined parts. `list` is the query of the list that contains the session. */
export function link({ id, leaf, turn, token, side, mode, list = "" }) {
  const parts = Object.entries({ session: id, leaf, turn, token, with: side, view: mode }).filter(([, value]) => value !== null && value !== undefined);
  return `#/${parts.flat().map(encodeURIComponent).join("/")}${list && `?${list}`}`;
}

/** The session whose branch a side is; undefined if it is the shown session. */
export const otherOf = (side) => side?.match(/^(?:leaf-\d+-of|session)-(.*)$/s)?.[1];

/** The leaf of an address: its leaf, else the newest leaf after its turn, else the newest leaf, main branches first. */
export function leafOf({ session_id: id, leaves }, { leaf, turn }) {
  if (!leaves.length) return null;
  const leafAfter = (seq) => leaves.filter((one) => one.path.includes(seq)).at(-1)?.turn;
  if (leaf !== null) {
    const found = leaves.find((one) => one.turn === leaf)?.turn ?? leafAfter(leaf);
    if (found === undefined) throw new Refused(404, `Session ${id} has no leaf ${leaf}.`);
    return found;
  }
  const main = leaves.filter((one) => !one.role || one.role === "main");
  return (turn === null ? undefined : leafAfter(turn)) ?? (main.at(-1) ?? leaves.at(-1)).turn;
}
