/** With more messages in a round, those of one rank are shown. */
const MOST = 500;

/** The ranks on a circle, and the messages of a round between them. */
class Wheel {
  constructor(run, box, pick) {
    Object.assign(this, { run, box, rank: null, frame: 0 });
    const p = run.size, size = clamp(64 / Math.sqrt(p), 7, 19);
    this.radius = 145;
    this.size = size;
    this.where = Array.from({ length: p }, (_, r) => {
      const angle = (2 * Math.PI * r) / p;
      return p === 1 ? [180, 180] : [180 + this.radius * Math.sin(angle), 180 - this.radius * Math.cos(angle)];
    });
    const ranks = this.where.map(([x, y], r) => `<g class="rank" data-rank="${r}"><circle cx="${x}" cy="${y}" r="${size}"/>
      <text x="${x}" y="${y}" font-size="${clamp(size * 0.95, 7, 16)}">${r}</text></g>`);
    box.innerHTML = `<svg viewBox="8 8 344 344" role="img" aria-label="ranks on a circle, and the messages of this round">
      <g class="edges"></g><g class="ranks">${ranks.join("")}</g><g class="tokens"></g>
      <text class="only" x="180" y="180" text-anchor="middle" font-size="12"></text></svg>`;
    box.addEventListener("click", event => {
      const found = event.target.closest(".rank");
      pick(found ? +found.dataset.rank : null);
    });
  }
  show(round, number, forward) {
    cancelAnimationFrame(this.frame);
    const all = round ? round.moves.filter(m => m[0] !== COPY) : [];
    const one = this.rank ?? 0, crowded = all.length > MOST;
    this.moves = crowded ? all.filter(m => m[1] === one || m[2] === one) : all;
    this.again = crowded ? () => this.show(round, number, false) : null; // for another rank
    this.box.querySelector(".only").textContent = crowded ? `rank ${one}'s messages of ${all.length}` : "";
    const seen = new Map();
    this.paths = this.moves.map(m => {
      const key = `${m[1]} ${m[2]}`, nth = seen.get(key) || 0;
      seen.set(key, nth + 1);
      return this.path(m[1], m[2], nth);
    });
    const labelled = this.moves.length <= 40, small = this.moves.length > 40;
    const draw = ([x0, y0, cx, cy, x1, y1], m) => {
      const kind = m[0] === REDUCE ? "reduce" : "receive", a = Math.atan2(y1 - cy, x1 - cx);
      const tip = [[0, 0], [-10, 4.5], [-10, -4.5]].map(([u, v]) =>
        `${x1 + u * Math.cos(a) - v * Math.sin(a)},${y1 + u * Math.sin(a) + v * Math.cos(a)}`);
      return `<g class="move"><path class="edge ${kind}" ${small ? 'style="stroke-width:1.1"' : ""} d="M${x0} ${y0}Q${cx} ${cy} ${x1} ${y1}"/>
        <polygon class="tip ${kind}" points="${tip.join(" ")}"/></g>`;
    };
    this.box.querySelector(".edges").innerHTML = this.moves.map((m, i) => draw(this.paths[i], m)).join("");
    const token = m => {
      const kind = m[0] === REDUCE ? "reduce" : "receive", text = m[7] === 1 ? `${m[6]}` : `${m[6]}–${m[6] + m[7] - 1}`;
      const wide = Math.max(10, 4 + 3.8 * text.length);
      return labelled ? `<g class="token ${kind}"><rect class="${kind}" x="${-wide}" y="-9" width="${2 * wide}" height="18" rx="9"/><text>${text}</text></g>`
        : `<g class="token ${kind}"><circle class="${kind}" r="2.5"/></g>`;
    };
    this.box.querySelector(".tokens").innerHTML = this.moves.map(token).join("");
    this.tokens = [...this.box.querySelectorAll(".token")];
    const busy = new Set(this.moves.flatMap(m => [m[1], m[2]]));
    this.box.querySelectorAll(".rank").forEach((g, r) => g.classList.toggle("busy", busy.has(r)));
    const rest = 0.5, begun = performance.now();
    const fly = now => {
      const t = clamp((now - begun) / 550, 0, 1), eased = t * t * (3 - 2 * t);
      this.put(t < 1 ? eased : rest);
      if (t < 1) this.frame = requestAnimationFrame(fly);
    };
    this.put(rest);
    if (forward && this.moves.length && !calm.matches) fly(begun);
    this.mark();
  }
  put(t) {
    this.tokens.forEach((token, i) => {
      const [x0, y0, cx, cy, x1, y1] = this.paths[i], s = 1 - t;
      token.setAttribute("transform", `translate(${s * s * x0 + 2 * s * t * cx + t * t * x1} ${s * s * y0 + 2 * s * t * cy + t * t * y1})`);
    });
  }
  /** From the rim of one circle to that of the other, bent to the left of the way. */
  path(from, to, nth) {
    const [ax, ay] = this.where[from], [bx, by] = this.where[to];
    const length = Math.hypot(bx - ax, by - ay), ux = (bx - ax) / length, uy = (by - ay) / length;
    const bend = Math.min(26, length * 0.16) + 15 * nth, cx = (ax + bx) / 2 + uy * bend, cy = (ay + by) / 2 - ux * bend;
    const rim = (x, y, gap) => {
      const l = Math.hypot(cx - x, cy - y) || 1;
      return [x + ((cx - x) / l) * gap, y + ((cy - y) / l) * gap];
    };
    return [...rim(ax, ay, this.size + 1), cx, cy, ...rim(bx, by, this.size + 3)];
  }
  choose(rank) {
    if (rank === this.rank) return;
    this.rank = rank;
    this.again?.();
    this.mark();
  }
  /** Fades what the chosen rank has no part in. */
  mark() {
    const { rank } = this;
    const faint = m => rank !== null && m[1] !== rank && m[2] !== rank;
    this.box.querySelectorAll(".move").forEach((g, i) => g.classList.toggle("faint", faint(this.moves[i])));
    this.tokens?.forEach((g, i) => g.classList.toggle("faint", faint(this.moves[i])));
  }
}
