// The keys of the page, and the list of them that `?` shows.

import { fill, h } from "./dom.js";

/** @type {Map<string, (event: KeyboardEvent) => void>} */
let bound = new Map();

/** Key names, what the key does, and the view that it opens if a page may lack that view. */
const ALWAYS = [
  [["?"], "this list"],
  [["g", "s"], "all sessions"],
  [["g", "r"], "run", "run"],
  [["g", "o"], "overview", "overview"],
  [["t"], "theme: system, light, dark"],
];

let sections = [];

/** Names of keys that were pressed while a view opened, which handles them once it is open. */
let held = null;

/** Keep keys for the next view. */
export function holdKeys() {
  bound = new Map();
  sections = [];
  held ??= [];
}

/**
 * Bind a view's keys in place of the previous view's keys.
 * @param {{title: string, keys: [string[], string, ((event: KeyboardEvent) => void)?][]}[]} groups
 */
export function bindKeys(groups) {
  bound = new Map();
  sections = groups;
  for (const { keys } of groups) {
    for (const [names, , run] of keys) for (const name of names) if (run) bound.set(name, run);
  }
  const waiting = held ?? [];
  held = null;
  for (const [name, event] of waiting) {
    const run = typing(document.activeElement) ? undefined : bound.get(name);
    // A key may open a different view, which handles the keys after it.
    if (run) run(event);
    else held?.push([name, event]);
  }
}

/** Whether a key is meant for the focused element. */
function typing(target) {
  return target instanceof Element && target.closest("input, select, textarea, dialog") !== null;
}

let prefix = "";

/** @param {Record<string, (event: KeyboardEvent) => void>} always */
export function listen(always) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur?.();
      return;
    }
    const name = prefix ? `${prefix} ${event.key}` : event.key;
    prefix = "";
    const shifted = event.shiftKey && event.key.length > 1 ? `Shift+${event.key}` : name;
    const run = always[name] ?? bound.get(shifted);
    if (run) {
      event.preventDefault();
      run(event);
    } else if (event.key === "g") {
      prefix = "g";
      setTimeout(() => (prefix = ""), 900);
    } else {
      held?.push([shifted, event]);
    }
  });
}

/** Show or hide the list of keys, without keys for the views in `missing`. */
export function toggleHelp(missing) {
  const dialog = document.getElementById("help");
  if (dialog.open) {
    dialog.close();
    return;
  }
  const table = ({ title, keys }) => [
    h("h3", {}, title),
    h(
      "dl",
      { class: "keys" },
      ...keys.flatMap(([names, what]) => [h("dt", {}, ...names.map((name) => h("kbd", {}, written(name)))), h("dd", {}, what)]),
    ),
  ];
  fill(
    dialog,
    h("h2", { id: "help-title" }, "Keys"),
    h("div", { class: "columns" }, ...[...sections, { title: "Everywhere", keys: ALWAYS.filter(([, , view]) => !missing.includes(view)) }].map((one) => h("section", {}, ...table(one)))),
    h("form", { method: "dialog" }, h("button", {}, "Close")),
  );
  dialog.showModal();
}

const WRITTEN = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "space" };

function written(name) {
  return name.replace("Shift+", "⇧ ").replace(/Arrow\w+| $/, (arrow) => WRITTEN[arrow] ?? arrow);
}
