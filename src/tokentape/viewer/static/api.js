// Requests to the server. The key stays in this tab and is sent only in a header.

import { count } from "./dom.js";

const BASE = new URL("../api/", import.meta.url);
const KEY = "tokentape.key";

/** An error reply: its status and the server's message. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function setKey(key) {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

/** The answers that an exported file contains, by path. */
const inFile = JSON.parse(document.getElementById("answers")?.textContent ?? "null");

/** Which sessions an exported file contains with their tokens. */
function holds() {
  const whole = Object.keys(inFile).filter((path) => /^sessions\/[^/]+$/.test(path)).length;
  return whole === 1 ? "1 session" : `the newest ${count(whole)} sessions`;
}

/** Decode an answer in an exported file: compressed, then base64-encoded. */
function answerInFile(path, query) {
  const part = query?.with ?? query?.group;
  // If the file lacks the run grouped by this key, show the run grouped by its first key.
  const found = inFile[part ? `${path}?${encodeURIComponent(part)}` : path] ?? (query?.group ? inFile[path] : undefined);
  if (found === undefined) throw new Refused(404, `This file does not contain it, only the tokens of ${holds()}.`);
  const bytes = Uint8Array.from(atob(found), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

async function ask(path, query, etag, signal) {
  if (inFile) return answerInFile(path, query);
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const headers = {};
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (etag) headers["If-None-Match"] = etag;
  let response;
  try {
    response = await fetch(url, { headers, cache: "no-store", credentials: "omit", signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer.");
  }
  if (response.status === 304 || response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
}

/** Parse JSON. Objects get no prototype, so that a name such as `constructor` is in them only if the server sent it. */
async function parsed(response) {
  return JSON.parse(await response.text(), (_, value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.setPrototypeOf(value, null) : value));
}

/** Fetch current JSON. */
export async function getJson(path, query, signal) {
  return parsed(await ask(path, query, null, signal));
}

/** Fetch JSON and its ETag; null if it has not changed since `etag`. */
export async function getIfNew(path, etag, signal) {
  const response = await ask(path, {}, etag, signal);
  return response.status === 304 ? null : { etag: response.headers.get("etag"), value: await parsed(response) };
}

/** Fetch packed arrays, see `pack` in viewer/_views.py. */
export async function getPacked(path, query, signal) {
  return unpack(await (await ask(path, query, null, signal)).arrayBuffer());
}

const KINDS = { u1: Uint8Array, i4: Int32Array, f4: Float32Array };

/** Unpack the header, and typed arrays that share the reply's bytes. */
export function unpack(buffer) {
  const view = new DataView(buffer);
  if (view.getUint32(0) !== 0x54545631) throw new Error("these are not packed arrays");
  const size = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const base = 8 * Math.ceil((8 + size) / 8);
  const arrays = {};
  for (const [name, { dtype, offset, length }] of Object.entries(header.arrays)) {
    arrays[name] = new KINDS[dtype](buffer, base + offset, length);
  }
  return { header, arrays };
}

/** The path to a session's data. */
export function sessionPath(sessionId, ...more) {
  return ["sessions", sessionId, ...more].map(encodeURIComponent).join("/");
}
