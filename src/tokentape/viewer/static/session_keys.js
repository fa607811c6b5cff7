// The keys of a session's page, and the targets of keys that move by line.

import { copy, counted } from "./dom.js";
import { pythonList } from "./inspector.js";

/** A session's groups of keys. Keys for tokens do nothing while no tokens are shown. */
export function sessionKeys(page) {
  const turns = () => page.trajectory.about.turns;
  const step = (by) => (event) => {
    const to = page.selection ? (page.shown?.next(page.selection.i, by) ?? page.selection.i + by) : firstSeen(page);
    page.choose(to, { extend: event.shiftKey });
  };
  const line = (by) => (event) => {
    const from = page.selection && page.shown?.pane.drawnElement(page.selection.i);
    if (from) page.choose(inLine(page, from, by), { extend: event.shiftKey });
    else page.choose(firstSeen(page));
  };
  const turnStep = (by) => () => {
    const n = page.selection ? page.trajectory.turnOf(page.selection.i) : -1;
    page.toTurn(Math.max(0, Math.min(turns().length - 1, n + by)));
  };
  const forks = () => turns().filter((turn) => turn.fork || turn.left_by.length).map((turn) => (turn.fork ? turn.start : turn.end - 1));
  const weights = () => page.trajectory.weightBoundaries().map((one) => one.start);
  const ids = () => {
    const { from, to } = page.selection ?? { from: 0, to: page.trajectory.length };
    copy(pythonList(page.trajectory.ids.subarray(from, to)), counted(to - from, "id"));
  };
  const having = (run) => (event) => page.trajectory && run(event);
  const of = (title, keys) => ({ title, keys: keys.map(([names, what, run]) => [names, what, having(run)]) });
  return [
    of("Tokens", [
      [["ArrowRight", "l"], "next token", step(1)],
      [["ArrowLeft", "h"], "token before", step(-1)],
      [["ArrowDown", "j"], "a line down", line(1)],
      [["ArrowUp", "k"], "a line up", line(-1)],
      [["Home"], "first token", () => page.choose(0)],
      [["End"], "last token", () => page.choose(page.trajectory.length - 1)],
      [["Shift+ArrowRight"], "choose more tokens", step(1)],
      [["Shift+ArrowLeft"], "choose fewer", step(-1)],
      [["Shift+ArrowDown"], "choose a line more", line(1)],
      [["Escape"], "choose none", () => page.clear()],
    ]),
    of("Places", [
      [["/"], "find text", () => page.finder.field.focus()],
      [["g t"], "go to a turn", () => page.finder.turn.focus()],
      [["n"], "next difference", () => page.toChange(1)],
      [["p"], "difference before", () => page.toChange(-1)],
      [["]"], "next turn", turnStep(1)],
      [["["], "turn before", turnStep(-1)],
      [["f"], "next fork", () => page.toNext(forks(), 1, "fork")],
      [["F"], "fork before", () => page.toNext(forks(), -1, "fork")],
      [["w"], "next change of weights", () => page.toNext(weights(), 1, "change of weights")],
      [["W"], "change of weights before", () => page.toNext(weights(), -1, "change of weights")],
    ]),
    of("Views", [
      [["s"], "side by side, or the conversation", () => page.setMode(page.beside ? "conversation" : "beside")],
      [["v"], "every token, or the conversation", () => page.setMode(page.mode === "conversation" ? "tokens" : "conversation")],
      [["d"], "compare with the next side", () => page.otherSide()],
      [["x"], "compare with another session", () => page.parts.tools.querySelector(".others")?.click()],
      [["c"], "copy the chosen ids, or all", ids],
      [["y"], "copy the link", () => copy(page.permalink(page.selection?.i), "the link")],
    ]),
    {
      title: "Session",
      keys: [
        [["J"], "next session", () => page.toNeighbour(1)],
        [["K"], "session before", () => page.toNeighbour(-1)],
        [["o"], "the turns, in a narrow window", () => page.showTree()],
      ],
    },
  ];
}

/** The token in the next or previous line that is closest below or above an element. */
function inLine({ shown, selection, trajectory }, element, by) {
  const here = element.getClientRects()[0];
  let best = selection.i;
  let line = null;
  for (let i = shown.next(selection.i, by), steps = 0; i >= 0 && i < trajectory.length && steps < 600; i = shown.next(i, by), steps++) {
    const rect = shown.pane.element(i)?.getClientRects()[0];
    if (!rect || Math.abs(rect.top - here.top) < 8) continue;
    line ??= rect.top;
    if (Math.abs(rect.top - line) > 8) break;
    best = i;
    if (by > 0 ? rect.right > here.left + 2 : rect.left <= here.left + 2) break;
  }
  return best;
}

function firstSeen({ parts, shown }) {
  const { top } = parts.pane.getBoundingClientRect();
  for (const block of [...(shown?.pane.drawn ?? [])].sort((a, b) => a.start - b.start)) {
    for (const element of block.element.querySelectorAll(shown.pane.token)) {
      if (element.getBoundingClientRect().top >= top) return Number(element.dataset.i);
    }
  }
  return 0;
}
