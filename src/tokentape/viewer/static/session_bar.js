// The bar above a session's tokens: the branch, and what it is compared with.

import { otherOf } from "./address.js";
import { sideName } from "./compare.js";
import { count, counted, fill, h, pairs, real, when } from "./dom.js";
import { verdictBadge } from "./tree.js";

export const MODES = { conversation: "Conversation", tokens: "Tokens", beside: "Recorded vs. retokenized" };

/** The name of the side-by-side view, by what the record is compared with. */
function besideName(side) {
  if (otherOf(side) !== undefined) return "Two sessions";
  if (side?.startsWith("leaf-")) return "Two branches";
  return side === "rerendered" ? "Recorded vs. rerendered" : MODES.beside;
}

/** What a branch can be compared with. With a tokenizer, also other branches and the last compared session. */
export function sidesOf({ view, tree, leaf, side, sides, comparisons }) {
  const { against, text, exported } = view.about;
  const branches = tree.leaves.filter((one) => text && !exported && one.turn !== leaf);
  const id = otherOf(side);
  const leaves = comparisons.get(side)?.about.leaves ?? [];
  const others = id === undefined ? sides.filter((one) => otherOf(one) !== undefined) : [side, `session-${id}`, ...(leaves.length > 1 ? leaves.slice(0, 50).map((one) => `leaf-${one}-of-${id}`) : [])];
  return [...against, ...branches.slice(0, 50).map((one) => `leaf-${one.turn}`), ...new Set(others)];
}

/** The list to choose a second session from, limited to the group if any; null if sessions can't be compared. */
export function otherSessions({ session_id: id, metadata }, { text, exported, only_session: alone, group_keys: keys }) {
  if (!text || exported || alone) return null;
  const key = keys.find((one) => one in metadata && !metadata[one].includes("\n"));
  return `#/sessions?${new URLSearchParams({ ...(key && { metadata: `${key}=${metadata[key]}` }), compare: id })}`;
}

/**
 * Draw the heading of a session.
 * @param {{tree: any, leaf: any, grows: boolean, toNeighbour: (by: number) => void}} session `leaf`: of the branch that is shown
 */
export function drawHead(place, { tree, leaf, grows, toNeighbour }) {
  const facts = leaf
    ? [counted(leaf.tokens, "token"), `${count(leaf.sampled_tokens)} sampled`, `${count(leaf.trained_tokens)} trained`]
    : [];
  if (tree.created_at) facts.push(`begun ${when(tree.created_at)}`);
  if (tree.owner) facts.push(`key ${tree.owner}`);
  const metadata = pairs(tree.metadata);
  // Whether a turn was recorded in the last minute.
  const live = grows && 1000 * (tree.turns.at(-1)?.created_at ?? 0) > Date.now() - 60000;
  fill(
    place,
    h("h1", {}, tree.session_id),
    leaf && h("span", { class: "dim" }, `branch to turn ${leaf.turn}`),
    leaf && verdictBadge(leaf.verdict),
    leaf?.role && leaf.role !== "main" && h("span", { class: "badge", title: "by lineage" }, leaf.role.replace("_", " ")),
    leaf && h("span", { class: "badge" }, leaf.reward === null ? "no reward" : `reward ${real(leaf.reward)}`),
    h("span", { class: "dim" }, facts.join(" · ")),
    metadata && h("span", { class: "metadata", title: metadata }, metadata.replaceAll("\n", " · ")),
    h("span", { class: "space" }),
    h("button", { class: "quiet", onclick: () => toNeighbour(-1), title: "Session before (K)", "aria-label": "Session before" }, "‹"),
    h("button", { class: "quiet", onclick: () => toNeighbour(1), title: "Next session (J)", "aria-label": "Next session" }, "›"),
    live && h("span", { class: "live", title: "turns appear as they are recorded" }, h("span", { class: "dot", "aria-hidden": "true" }), "live"),
  );
}

/**
 * Draw the choice of views, and of sides to compare with.
 * @param {{mode: string, side: string | null, sides: string[], others: string | null, comparison: any, problem: string | null}} state
 * @param {{setMode: (mode: string) => void, setSide: (side: string) => void, showTree: () => void, toChange: (by: number) => void}} page
 */
export function drawTools(place, { mode, side, sides, others, comparison, problem }, page) {
  const tab = ([name, text]) =>
    h("button", { "aria-pressed": String(mode === name), onclick: () => page.setMode(name), disabled: name === "beside" && !sides.length }, name === "beside" ? besideName(side) : text);
  const select = h(
    "select",
    { id: "side", onchange: (event) => page.setSide(event.target.value) },
    ...sides.map((one) => h("option", { value: one, selected: one === side }, sideName(one))),
  );
  fill(
    place,
    h("button", { class: "totree", "aria-expanded": "false", onclick: () => page.showTree() }, "Turns"),
    h("div", { class: "segmented", role: "group", "aria-label": "View" }, ...Object.entries(MODES).map(tab)),
    sides.length && h("label", { for: "side" }, "compare with"),
    sides.length && select,
    others && h("a", { class: "others", href: others, title: "Choose it in the list (x)" }, "another session…"),
    comparison && h("span", { class: comparison.changes.length ? "driftcount" : "dim", title: [counted(comparison.changes.length, "difference"), ...comparison.classes().map(([name, times]) => `${name} ${times}`)].join(", ") }, comparison.changes.length ? `≠ ${comparison.recorded ? "" : `${counted(comparison.about.changed_tokens, "token")}, `}${counted(comparison.changes.length, "difference")}` : comparison.recorded ? "no difference" : "no drift"),
    comparison?.changes.length > 0 &&
      h(
        "span",
        {},
        h("button", { class: "quiet", onclick: () => page.toChange(-1), title: "Previous (p)", "aria-label": "Previous difference" }, "↑"),
        h("button", { class: "quiet", onclick: () => page.toChange(1), title: "Next (n)", "aria-label": "Next difference" }, "↓"),
      ),
    mode !== "beside" && problem && h("span", { class: "dim" }, problem),
  );
}
