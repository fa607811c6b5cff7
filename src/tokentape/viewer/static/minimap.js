// The whole trajectory as one narrow picture: who wrote what, where turns begin, where drift is.

const KINDS = 9;

/** What a variable of the style sheet is in this theme. A canvas takes plain colours only, no `light-dark()`. */
function colourOf(canvas, name) {
  canvas.style.setProperty("color", `var(${name})`);
  return getComputedStyle(canvas).color;
}

/** Draw the map, and call `onGo(token)` when somebody points into it. */
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
    const y = (i) => (i / Math.max(n, 1)) * height;
    for (const { start, end, code } of trajectory.pieces()) {
      context.fillStyle = colours[code] || "#888";
      context.globalAlpha = code === 1 ? 0.75 : 0.3;
      context.fillRect(2, y(start), width - 8, Math.max(y(end) - y(start), 0.4));
    }
    context.globalAlpha = 1;
    context.fillStyle = colourOf(canvas, "--line");
    for (const turn of trajectory.about.turns) context.fillRect(0, y(turn.start), width, 0.6);
    if (comparison) {
      context.fillStyle = colourOf(canvas, "--drift");
      for (const change of comparison.changes) {
        context.fillRect(width - 5, y(change.start), 5, Math.max(y(change.end) - y(change.start), 2));
      }
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
