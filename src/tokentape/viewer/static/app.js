// The whole page: the view that the URL selects, the key, the theme.

import { Refused, getJson, hasKey, setKey } from "./api.js";
import { fill, h, say } from "./dom.js";
import { bindKeys, holdKeys, listen, toggleHelp } from "./keys.js";
import { showList } from "./list.js";
import { showOverview } from "./overview.js";
import { showRun } from "./run.js";
import { showSession } from "./session.js";

const main = document.getElementById("main");
let about = null;
let leave = () => {};
let shown = 0;

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("tokentape.theme", theme);
  drawTop();
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  say(`Theme: ${document.documentElement.dataset.theme ?? "system"}`);
}

/** Views that are unavailable on this page. */
const missing = () => [about?.only_session && "run", !about?.overview && "overview"];

const help = () => toggleHelp(missing());

function drawTop() {
  const here = location.hash.split(/[/?]/)[1] || "sessions";
  const link = (name, text) =>
    h("a", { href: `#/${name}`, "aria-current": here === name || (here === "session" && name === "sessions") ? "page" : null }, text);
  const theme = document.documentElement.dataset.theme ?? "system";
  fill(
    document.getElementById("top"),
    h("a", { class: "brand", href: "#/sessions" }, h("span", { class: "logo", "aria-hidden": "true" }), "Tokentape"),
    about && h("span", { class: "source", title: `Tokentape ${about.version}` }, about.name),
    about && h("nav", { "aria-label": "Views" }, link("sessions", "Sessions"), !about.only_session && link("run", "Run"), about.overview && link("overview", "Overview")),
    h("span", { class: "space" }),
    about && !about.text && h("span", { class: "note", title: about.why_no_text }, "ids only"),
    hasKey() && h("button", { class: "quiet", onclick: signOut }, "Sign out"),
    h("button", { class: "quiet", onclick: nextTheme, title: "Theme (t)" }, h("span", { class: "word" }, "Theme: "), theme),
    h("button", { class: "quiet", onclick: help, title: "Keys (?)", "aria-label": "Keys" }, "?"),
  );
}

function signOut() {
  setKey(null);
  about = null;
  show();
}

function askForKey(message) {
  const field = h("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const sent = (event) => {
    event.preventDefault();
    setKey(field.value.trim());
    show();
  };
  document.title = "Sign in · Tokentape";
  fill(
    main,
    h(
      "form",
      { class: "card signin", onsubmit: sent },
      h("h1", {}, "API key"),
      h("p", {}, "You can see the sessions that your key may read. The key stays in this tab."),
      message && h("p", { class: "error", role: "alert" }, message),
      h("label", { for: "key" }, "Key"),
      field,
      h("button", { class: "primary" }, "Show"),
    ),
  );
  field.focus();
}

function failed(error) {
  if (error.name === "AbortError") return;
  bindKeys([]);
  if (error instanceof Refused && error.status === 401) {
    const message = hasKey() ? error.message : null;
    setKey(null);
    drawTop();
    askForKey(message);
    return;
  }
  const heading = error.status === 404 ? "Not found" : "That did not work";
  document.title = `${heading} · Tokentape`;
  fill(
    main,
    h(
      "div",
      { class: "card", role: "alert" },
      h("h1", {}, heading),
      h("p", {}, error.message),
      h("p", {}, h("a", { href: "#/sessions" }, "All sessions")),
    ),
  );
  if (!(error instanceof Refused)) console.error(error);
}

/** The decoded parts of the URL's path. */
function partsOf(path) {
  try {
    return path.split("/").slice(1).map(decodeURIComponent);
  } catch {
    throw new Refused(404, `The link #${path} is not valid: after a % it must have a UTF-8 byte as two hexadecimal digits.`);
  }
}

/** Show the view that the URL selects. */
async function show() {
  const turn = ++shown;
  leave();
  leave = () => {};
  holdKeys();
  const stop = new AbortController();
  try {
    about ??= await getJson("about");
    if (turn !== shown) return;
    drawTop();
    if (!location.hash && about.only_session) history.replaceState(null, "", `#/session/${encodeURIComponent(about.only_session)}`);
    const [path, query] = location.hash.slice(1).split("?");
    const parts = partsOf(path);
    const view = { main, about, parts, query: new URLSearchParams(query), signal: stop.signal, failed };
    leave = () => stop.abort();
    if (parts[0] === "session" && parts[1]) await showSession(view);
    else if (parts[0] === "run") await showRun(view);
    else if (parts[0] === "overview") await showOverview(view);
    else await showList(view);
  } catch (error) {
    if (turn === shown) failed(error);
  }
}

const stored = localStorage.getItem("tokentape.theme");
if (THEMES.includes(stored) && stored !== "system") document.documentElement.dataset.theme = stored;

const go = (hash) => () => (location.hash = hash);
const goIfThere = (view) => () => missing().includes(view) || go(`#/${view}`)();
listen({ "?": help, t: nextTheme, "g s": go("#/sessions"), "g r": goIfThere("run"), "g o": goIfThere("overview") });
addEventListener("hashchange", show);
drawTop();
show();
