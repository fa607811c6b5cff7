// The legend of a token's lanes, always visible above the tokens.

import { h } from "./dom.js";

const WRITERS = ["sampled", "template", "system", "user", "tool", "assistant", "close"];

export function legend() {
  const token = (classes, text, title) => h("span", { class: `t ${classes}`, title }, text);
  return h(
    "div",
    { class: "legend", role: "note", "aria-label": "Legend" },
    h("span", { title: "The line at the foot of a token: who wrote it" }, ...WRITERS.flatMap((name, n) => [token(`p${n + 1}`, name), " "])),
    h("span", { title: "A bar above a token" }, token("p1 m", "trained")),
    h("span", { title: "A bar below a token: minus its logprob, in nats; higher is less likely" }, "logprob ", ...[0, 2, 4, 7].map((step) => token(`p1 l${step}`, step === 7 ? "≤-7" : `-${step}`))),
    h("span", { title: "Different ids or text on the side that it is compared with" }, token("p1 d", "drift")),
    h("span", { title: "A control token; letters that only spell one" }, token("p2 control", "<|control|>"), " ", token("p4 letters", "<|letters|>")),
  );
}
