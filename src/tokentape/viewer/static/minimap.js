// A narrow map of the whole trajectory: who wrote what, where turns begin, where drift is.

const KINDS = 9;

/** The value of a CSS variable in this theme. A canvas accepts only plain colors, not `light-dark()`. */
function colourOf(canvas, name) {
  canvas.style.setProperty("color", `var(${name})`);
  return getComputedStyle(canvas).color;
}

/** Add a range of heights to the map's lines, as the covered fraction of each line. */
function cover(lines, from, to) {
  for (let line = Math.floor(from); line < to; line++) lines[line] += Math.min(to, line + 1) - Math.max(from, line);
}

/** Draw the map, and call `onGo(token)` when the user points into it. */
export class Minimap {
  constructor(canvas, onGo) {
    this.canvas = canvas;
    const go = (event) => {
      const { top, height } = canvas.getBoundingClientRect();
      if (this.trajectory) onGo(Math.floor(((event.clientY - top) / height) * this.trajectory.length));
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      go(event);
    });
    canvas.addEventListener("pointermove", (event) => event.buttons && go(event));
    this.redraw = () => this.trajectory && this.draw(this.trajectory, this.comparison, this.at);
    this.resized = new ResizeObserver(this.redraw);
    this.resized.observe(canvas);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.redraw);
    this.themed = new MutationObserver(this.redraw);
    this.themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  draw(trajectory, comparison, at) {
    this.trajectory = trajectory;
    this.comparison = comparison;
    this.at = at;
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !height) return;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = Array.from({ length: KINDS }, (_, code) => colourOf(canvas, `--p${code}`));
    const n = trajectory.length;
    const { turns } = trajectory.about;
    const y = (i) => (i / Math.max(n, 1)) * height;
    // A line of the map may represent hundreds of tokens: it shows each writer's share, side by side.
    const writers = Array.from({ length: KINDS }, () => new Float32Array(Math.ceil(height)));
    for (const { start, end, code } of trajectory.pieces()) cover(writers[code] ?? writers[0], y(start), y(end));
    for (let line = 0; line < height; line++) {
      let x = 2;
      writers.forEach((shares, code) => {
        context.fillStyle = colours[code];
        context.globalAlpha = code === 1 ? 0.75 : 0.3;
        context.fillRect(x, line, shares[line] * (width - 8), 1);
        x += shares[line] * (width - 8);
      });
    }
    context.globalAlpha = 1;
    context.fillStyle = colourOf(canvas, "--line");
    // Lines closer than this would hide what is between them.
    if (turns.length < height / 8) for (const turn of turns) context.fillRect(0, y(turn.start), width, 0.6);
    if (comparison) {
      context.fillStyle = colourOf(canvas, "--drift");
      const changed = new Float32Array(Math.ceil(height));
      for (const change of comparison.changes) cover(changed, y(change.start), y(Math.max(change.end, change.start + 1)));
      const most = Math.max(...changed);
      changed.forEach((share, line) => {
        // Lines with more changes are darker, and every changed line is visible.
        context.globalAlpha = share && 0.3 + 0.7 * (share / most);
        context.fillRect(width - 5, line, 5, changed[line + 1] ? 1 : 2);
      });
      context.globalAlpha = 1;
    }
    if (at !== null) {
      context.fillStyle = colourOf(canvas, "--accent");
      context.fillRect(0, y(at) - 1, width, 2);
    }
  }

  close() {
    this.resized.disconnect();
    this.themed.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }
}
