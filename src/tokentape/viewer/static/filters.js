// The fields that filter a list.

import { h } from "./dom.js";
import { CAUSES } from "./tree.js";

const VERDICTS = ["exact", "forked", "closed", "captured", "captured with drift"];
const RESERVATIONS = ["model unverified", "bridge unchecked", "bridge differs", "kept partial", "unread", "other logprobs", "supports not known", "logprobs not known"];
const ROLES = ["main", "subagent", "side_call"];

/** The fields in the second row, which narrow windows fold. */
const MORE_FILTERS = ["drift", "role", "weights", "fork", "reward_min", "reward_max", "from", "to"];
export const FILTERS = ["search", "verdict", "metadata", "group_key", "group_value", ...MORE_FILTERS];

/**
 * The form, with `chips` for the chosen metadata.
 * @param {Record<string, string>} wanted
 * @param {(name: string, value: string) => void} filter
 * @param {(pair: string) => void} addMetadata
 * @param {boolean} hasText whether there is a tokenizer, which measuring drift needs
 */
export function filterForm(wanted, chips, filter, addMetadata, hasText) {
  // Keep a label on the same line as its field.
  const pair = (name, label, control) => h("span", { class: "pair" }, h("label", { for: name }, label), control);
  const field = (name, label, attributes) =>
    pair(name, label, h("input", { id: name, value: wanted[name], spellcheck: "false", oninput: (event) => filter(name, event.target.value), ...attributes }));
  const select = (name, label, options) =>
    pair(
      name,
      label,
      h(
        "select",
        { id: name, onchange: (event) => filter(name, event.target.value) },
        ...[["", "any"], ...options].map(([value, text]) => h("option", { value, selected: value === wanted[name] }, text ?? value)),
      ),
    );
  const several = (names) => names.map((name) => [name]);
  const added = h("input", {
    id: "metadata",
    placeholder: "key=value, Enter",
    spellcheck: "false",
    onkeydown: (event) => {
      if (event.key !== "Enter" || !/^[^=]+=/.test(event.target.value)) return;
      addMetadata(event.target.value);
      event.target.value = "";
    },
  });
  return h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h(
      "div",
      {},
      field("search", "Search", { type: "search", placeholder: "id or metadata" }),
      select("verdict", "Verdict", several([...VERDICTS, ...RESERVATIONS])),
      pair("metadata", "Metadata", added),
      chips,
    ),
    h(
      "details",
      { open: innerWidth > 1000 || MORE_FILTERS.some((name) => wanted[name]) },
      h("summary", {}, "More filters"),
      h(
        "div",
        {},
        hasText && select("drift", "Drift", [["any", "with drift"], ["none", "without"]]),
        select("role", "Role", several(ROLES)),
        field("weights", "Weights", { placeholder: "version", class: "short" }),
        select("fork", "Forks", [["any", "with a fork"], ["none", "without"], ...several(Object.keys(CAUSES))]),
        field("reward_min", "Reward from", { type: "number", step: "any", class: "short" }),
        field("reward_max", "to", { type: "number", step: "any", class: "short" }),
        field("from", "Begun from", { type: "date" }),
        field("to", "to", { type: "date" }),
      ),
    ),
  );
}
