// Make elements. All shown text goes through text nodes, so it can't become markup.

/**
 * An element with attributes, listeners (`onclick` and the like) and children.
 * @param {string} tag
 * @param {Record<string, any>} [attributes] null and false omit an attribute
 * @param {...(Node | string | number | null | false | undefined)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== false && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Metadata as `key=value`, one per line. Characters that change the direction of text are escaped, so that they can't reorder the rest. */
export function pairs(metadata) {
  const lines = Object.entries(metadata).map(([key, value]) => `${key}=${value}`);
  return lines.join("\n").replace(/\p{Bidi_Control}/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** Replace an element's content with `children`. */
export function fill(element, ...children) {
  element.replaceChildren(...children.filter(Boolean).map(asNode));
  return element;
}

/** Announce a change to screen readers, and show it for a moment. */
export function say(text) {
  const said = document.getElementById("said");
  said.textContent = text;
  said.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => said.classList.remove("shown"), 2400);
}

const whole = new Intl.NumberFormat("en-US");

/** 12345 as 12,345. */
export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

/** "1 turn", "2 turns". */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A number for people: four significant digits, and all digits before the point. */
export function real(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "none" : String(value);
  const size = Math.abs(value);
  return size >= 1e4 && size < 1e15 ? whole.format(Math.round(value)) : String(Number(value.toPrecision(4)));
}

/** Unix seconds as local date and time. */
export function when(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`
  );
}

/** Copy text and announce it. Pages over plain HTTP from remote hosts have no clipboard API. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say(`Copied ${what}`);
}
