// A session's turns as a tree: what each turn continues, which turns forked and why, which were aborted.

import { count, counted, fill, h, real, when } from "./dom.js";

export const CAUSES = {
  sibling: "the same request was sampled again: a retry, or one of several choices",
  branched: "a different request continued the same turn",
  edited_history: "the agent sent a history that differs from the record",
  new_setup: "tools or template settings changed",
  template_rewrites: "the template can't append the requested messages",
  template_history: "the template drops part of earlier turns, as requested",
  other_stop: "the previous turn ended with a different stop token than the template writes",
  drift: "the server built a different context than the session had",
};

/** Draw the tree. `chosen` is the leaf whose path is shown; `address(turn)` returns the link to a turn. */
export function drawTree(place, tree, chosen, address) {
  const children = new Map();
  for (const turn of tree.turns) {
    if (!children.has(turn.parent)) children.set(turn.parent, []);
    children.get(turn.parent).push(turn);
  }
  const path = new Set(tree.leaves.find((leaf) => leaf.turn === chosen)?.path ?? []);
  const leaves = new Map(tree.leaves.map((leaf) => [leaf.turn, leaf]));
  const edges = tree.lineage;

  /** Where a branch comes from, by lineage. */
  function origin(edge) {
    const other = edge.parent_session !== tree.session_id;
    const turn = edge.parent === null ? "" : `turn ${edge.parent}`;
    const text = [edge.kind.replace("_", " "), "of", other ? edge.parent_session : "", turn || (other ? "" : "another turn")].filter(Boolean).join(" ");
    const href = other ? `#/session/${encodeURIComponent(edge.parent_session)}${turn && `/turn/${edge.parent}`}` : edge.parent !== null && address({ seq: edge.parent });
    return h("a", { class: "origin", href: href || null, title: `${edge.evidence}; confidence ${real(edge.confidence)}` }, `⤷ ${text}`);
  }

  /** The list of a turn and the turns that continue it; forks are nested lists. */
  function branch(first) {
    const items = [];
    for (let turn = first; turn; ) {
      const next = children.get(turn.seq) ?? [];
      const onward = next.find((one) => one.fork === null && one.finish_reason !== "abort") ?? next.find((one) => one.fork === null);
      const forks = next.filter((one) => one !== onward);
      items.push(h("li", {}, line(turn), ...edges.filter((edge) => edge.turn === turn.seq).map(origin), ...forks.map((fork) => branch(fork))));
      turn = onward;
    }
    return h("ol", {}, ...items);
  }

  function line(turn) {
    const aborted = turn.finish_reason === "abort";
    const leaf = leaves.get(turn.seq);
    return h(
      "a",
      {
        href: address(turn),
        class: `turnline${turn.seq === chosen ? " leaf" : ""}${path.has(turn.seq) ? " onpath" : ""}${aborted ? " aborted" : ""}`,
        "data-turn": turn.seq,
        // The style sheet draws these two, so that sessions with many turns have few elements per line.
        "data-mark": aborted ? "✕" : leaf ? "◉" : "○",
        "data-sizes": `+${count(turn.added_tokens)} ⟶ ${count(turn.sampled_tokens)}`,
        title: [
          `turn ${turn.seq}: ${count(turn.added_tokens)} added, ${count(turn.sampled_tokens)} sampled`,
          turn.finish_reason && `ended by ${turn.abort_cause ? `abort, ${turn.abort_cause}` : turn.finish_reason}`,
          turn.created_at && when(turn.created_at),
        ]
          .filter(Boolean)
          .join("\n"),
      },
      aborted ? h("s", {}, `turn ${turn.seq}`) : `turn ${turn.seq}`,
      turn.fork && h("span", { class: "badge fork", title: CAUSES[turn.fork] ?? "" }, `↳ ${turn.fork}`),
      aborted && h("span", { class: "badge bad" }, `aborted: ${turn.abort_cause ?? "unknown"}`),
      turn.finish_reason === "length" && h("span", { class: "badge warn" }, "length"),
      turn.resumes.length > 0 && h("span", { class: "badge warn", title: turn.resumes.join(", ") }, `resumed ${turn.resumes.length}×`),
      turn.reward !== null && h("span", { class: "badge" }, `reward ${real(turn.reward)}`),
    );
  }

  const forks = tree.turns.filter((turn) => turn.fork).length;
  const aborted = tree.turns.filter((turn) => turn.finish_reason === "abort").length;
  const summary = [counted(tree.turns.length, "turn"), counted(tree.leaves.length, "branch").replace("branchs", "branches")];
  if (forks) summary.push(counted(forks, "fork"));
  if (aborted) summary.push(`${aborted} aborted`);
  fill(
    place,
    h("h2", {}, "Turns"),
    h("p", { class: "dim" }, summary.join(" · ")),
    ...(children.get(null) ?? []).map((root) => branch(root)),
  );
}

/** Mark the turn in view, and keep it in view in the tree too. */
export function markTurn(place, seq) {
  const line = place.querySelector(`.turnline[data-turn="${seq}"]`);
  const before = place.querySelector("[aria-current]");
  if (line === before) return;
  before?.removeAttribute("aria-current");
  line?.setAttribute("aria-current", "location");
  line?.scrollIntoView({ block: "nearest" });
}

/** A verdict as a badge. */
export function verdictBadge(verdict) {
  const [known, ...reservations] = verdict.split(", ");
  const kind = { exact: "good", captured: "good", closed: "warn", forked: "fork" }[known.split(":")[0]] ?? "bad";
  return h("span", { class: `badge ${reservations.length && kind === "good" ? "warn" : kind}` }, verdict);
}
