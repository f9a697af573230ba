// Stacked bars: where each token's time went. Knows nothing of answers but their tokens' timings.

const KINDS = ["io", "memory", "compute", "other"];
const NAMES = { io: "reading", memory: "memory", compute: "computing", other: "other" };
const BAR = 7; // pixels of a bar and its gap

export class Chart {
  #canvas;
  #tokens = [];
  #first = 0; // token of the leftmost bar

  /** `say` gets a line about the token that is pointed at. */
  constructor(canvas, say) {
    this.#canvas = canvas;
    canvas.addEventListener("pointermove", (event) => {
      const at = this.#first + Math.floor(event.offsetX / BAR);
      if (this.#tokens[at]) say(describe(at, this.#tokens[at]));
    });
  }

  /** Draws the newest tokens that there is room for. */
  draw(tokens) {
    this.#tokens = tokens;
    const canvas = this.#canvas;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    this.#first = Math.max(0, tokens.length - Math.floor(width / BAR));
    const shown = tokens.slice(this.#first);
    const sorted = shown.map((each) => each.total_ms).sort((a, b) => a - b);
    // A few slow tokens do not make the others invisible: they are cut at the top.
    const most = Math.min(sorted.at(-1) ?? 1, 3 * (sorted[Math.floor(sorted.length / 2)] ?? 1)) || 1;
    shown.forEach((token, at) => {
      let bottom = height;
      for (const kind of KINDS) {
        const length = (token[`${kind}_ms`] / most) * (height - 18);
        context.fillStyle = style.getPropertyValue(`--${kind}`);
        context.fillRect(at * BAR, bottom - length, BAR - 1, length);
        bottom -= length;
      }
    });
    context.fillStyle = style.getPropertyValue("--faint");
    context.font = "12px system-ui, sans-serif";
    if (shown.length > 0) context.fillText(`${most.toFixed(1)} ms a token`, 4, 12);
  }
}

function describe(at, token) {
  const parts = KINDS.map((kind) => `${NAMES[kind]} ${token[`${kind}_ms`].toFixed(2)}`);
  const neurons = token.active > 0 ? `; ${token.hits} of ${token.active} neurons were in memory` : "";
  return `Token ${at + 1}: ${token.total_ms.toFixed(1)} ms (${parts.join(", ")})${neurons}`;
}
