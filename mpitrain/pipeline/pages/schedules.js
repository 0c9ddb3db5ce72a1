const PASSES = { F: "forward", B: "backward", I: "backward, input half", W: "backward, weight half",
  U: "update" };
const plain = seconds => +seconds.toFixed(3);

/** A schedule on the page: the chart, and what every stage does and holds at a time. */
class View {
  constructor(run, longest, pick) {
    Object.assign(this, { run, longest });
    this.node = document.createElement("section");
    this.node.className = "card view";
    this.node.setAttribute("aria-label", run.name);
    this.node.innerHTML = `<h2>${escaped(run.name)}</h2><p class="facts">${escaped(run.description)}.
      Takes ${plain(run.seconds)}; ${(100 * run.bubble).toFixed(1)}% of it idle.</p><div class="chart"></div>
      <table><thead><tr><th scope="col">stage</th><th scope="col">does</th>
      <th scope="col">holds activations of micro-batches (most)</th></tr></thead><tbody></tbody></table>`;
    this.chart = this.node.querySelector(".chart");
    this.chart.addEventListener("click", event => {
      const found = event.target.closest(".block");
      pick(found && found.dataset.micro !== "-1" ? +found.dataset.micro : null);
    });
    this.draw();
  }
  draw() {
    const { run } = this, shortest = Math.min(...run.blocks.map(b => b[5] - b[4]).filter(t => t > 0));
    const room = Math.max(this.chart.clientWidth, 300), left = 74;
    const unit = Math.max((room - left - 8) / this.longest, 17 / shortest), row = 34;
    const width = left + unit * run.seconds + 8, height = run.stages.length * row + 24;
    Object.assign(this, { left, unit, row });
    const x = t => left + unit * t;
    const rows = run.stages.map((name, s) => `<text class="name" x="0" y="${s * row + 17}">${escaped(name)}</text>
      <rect x="${left}" y="${s * row + 2}" width="${unit * run.seconds}" height="30" fill="var(--idle)" rx="3"/>`);
    const every = [1, 2, 5, 10, 20, 50, 100].find(n => n * unit >= 26) || 200;
    const ticks = Array.from({ length: Math.floor(run.seconds / every) + 1 }, (_, n) =>
      `<text class="tick" x="${x(n * every)}" y="${height - 10}">${n * every}</text>`);
    const blocks = run.blocks.map(([place, kind, micro, chunk, start, stop]) => {
      const wide = unit * (stop - start), y = place * row + 2;
      const text = kind !== "U" && wide >= 15 ? `<text x="${x(start) + wide / 2}" y="${y + 15.5}">${micro}</text>` : "";
      const name = `${run.stages[place]}: ${PASSES[kind]}${micro < 0 ? "" : ` of micro-batch ${micro}`}${chunk ? `, chunk ${chunk}` : ""}, ${plain(start)} to ${plain(stop)}`;
      return `<g class="block ${kind} ${chunk % 2 ? "odd" : ""}" data-micro="${micro}"><title>${name}</title>
        <rect x="${x(start)}" y="${y}" width="${wide}" height="30" rx="3"/>${text}</g>`;
    });
    this.chart.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img"
      aria-label="one row a stage, time to the right">${rows.join("")}${blocks.join("")}${ticks.join("")}
      <path class="way"/><line class="cursor" y1="0" y2="${height - 20}"/></svg>`;
    this.groups = [...this.chart.querySelectorAll(".block")];
  }
  /** What the stages do at `time`: their blocks, null while idle; and what they hold. */
  at(time) {
    const does = this.run.stages.map(() => null), holds = this.run.stages.map(() => new Map());
    for (const block of this.run.blocks) {
      const [place, kind, micro, chunk, start, stop] = block, key = `${micro} ${chunk}`;
      if (start <= time && time < stop) does[place] = block;
      if (kind === "F" && start <= time) holds[place].set(key, micro);
      if ((kind === "B" || kind === "W") && stop <= time) holds[place].delete(key);
    }
    return { does, holds: holds.map(held => [...held.values()]) };
  }
  show(time, micro) {
    const { run } = this, { does, holds } = this.at(time);
    this.groups.forEach((group, i) => {
      const [, , m, , start, stop] = run.blocks[i];
      group.classList.toggle("later", start > time);
      group.classList.toggle("now", start <= time && time < stop);
      group.classList.toggle("other", micro !== null && m !== micro);
    });
    const x = this.left + this.unit * Math.min(time, run.seconds), cursor = this.chart.querySelector(".cursor");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    const way = run.blocks.filter(b => micro !== null && b[2] === micro && b[1] !== "W").sort((a, b) => a[4] - b[4]);
    this.chart.querySelector(".way").setAttribute("d", way.slice(1).map((to, n) =>
      `M${this.left + this.unit * way[n][5]} ${way[n][0] * this.row + 17}L${this.left + this.unit * to[4]} ${to[0] * this.row + 17}`).join(""));
    if (this.chart.scrollWidth > this.chart.clientWidth) {
      const far = x - this.chart.clientWidth / 2;
      this.chart.scrollTo({ left: far, behavior: calm.matches ? "auto" : "smooth" });
    }
    const rows = run.stages.map((name, s) => {
      const block = does[s], chips = holds[s].map(m => `<span class="chip">${m}</span>`).join("");
      const doing = block ? `<span class="mark" style="background:var(--${block[1]})"></span>${doingOf(block)}`
        : time >= run.seconds ? "done" : '<span class="mark" style="background:var(--idle)"></span>idle';
      return `<tr><th scope="row">${escaped(name)}</th><td class="doing">${doing}</td>
        <td class="holds">${chips || "–"} <span class="dim">(${run.held[s]})</span></td></tr>`;
    });
    this.node.querySelector("tbody").innerHTML = rows.join("");
  }
  says(time) {
    const { does } = this.at(time);
    if (time >= this.run.seconds) return "done";
    return this.run.stages.map((name, s) => `${name} ${does[s] ? doingOf(does[s]) : "idle"}`).join(", ");
  }
}

const doingOf = ([, kind, micro, chunk]) => PASSES[kind] + (micro < 0 ? "" : ` ${micro}`) + (chunk ? `, chunk ${chunk}` : "");
const by = name => DATA.schedules.find(run => run.name === name);
let views = [], times = [], followed = null;

/** Follows a micro-batch through all stages; null ends that. */
function follow(micro) {
  followed = micro === followed ? null : micro;
  views.forEach(view => view.show(times[P.step], followed));
  P.link({ micro: followed === null ? "" : followed });
}

function build() {
  const runs = [by($("first").value), by($("second").value)].filter(Boolean);
  times = [...new Set(runs.flatMap(run => run.blocks.flatMap(b => [b[4], b[5]])))].sort((a, b) => a - b);
  views = runs.map(run => new View(run, Math.max(...runs.map(one => one.seconds)), follow));
  $("views").textContent = "";
  $("views").append(...views.map(view => view.node));
  views.forEach(view => view.draw()); // as wide as it has room now
  const kinds = "FBIWU".split("").filter(kind => runs.some(run => run.blocks.some(b => b[1] === kind && b[5] > b[4])));
  const swatch = (colour, text) => `<span><i style="background:var(--${colour})"></i>${text}</span>`;
  const chunks = runs.some(run => run.blocks.some(b => b[3]));
  $("legend").innerHTML = kinds.map(kind => swatch(kind, PASSES[kind])).join("") + swatch("idle", "idle: the bubble")
    + `<span>the number is the micro-batch${chunks ? "; paler: a stage's second chunk of layers" : ""}</span>`;
}

const P = player({
  word: "step", period: 900,
  last: () => times.length - 1,
  label: step => `time ${plain(times[step])} of ${plain(times[times.length - 1])}`,
  show(step) {
    views.forEach(view => view.show(times[step], followed));
    const says = views.map(view => `${views.length > 1 ? `${view.run.name}: ` : ""}${view.says(times[step])}`);
    $("said").textContent = `Time ${plain(times[step])}: ${says.join("; ")}.`;
  },
  key(event) {
    const last = Math.max(...views.flatMap(view => view.run.blocks.map(b => b[2])));
    const up = event.key === "ArrowUp", down = event.key === "ArrowDown";
    if (up || down) follow(followed === null ? 0 : (followed + (down ? 1 : last)) % (last + 1));
    else if (event.key === "Escape") follow(null);
    else return false;
    return true;
  },
  opened(parts) {
    if (by(parts.schedule)) $("first").value = parts.schedule;
    $("second").value = by(parts.beside) ? parts.beside : "";
    build();
    followed = /^\d+$/.test(parts.micro || "") ? +parts.micro : null;
    P.link({ schedule: $("first").value, beside: $("second").value });
    P.go(+parts.step || 0);
    P.link({ micro: followed === null ? "" : followed });
  },
});

$("title").textContent = DATA.title;
const options = DATA.schedules.map(run => `<option>${escaped(run.name)}</option>`).join("");
$("first").innerHTML = options;
$("second").innerHTML = `<option value="">none</option>${options}`;
for (const select of [$("first"), $("second")]) {
  select.parentNode.hidden = DATA.schedules.length < 2;
  select.onchange = () => {
    P.stop();
    const time = times[P.step];
    build();
    P.link({ schedule: $("first").value, beside: $("second").value });
    P.go(times.findLastIndex(t => t <= time));
  };
}
addEventListener("resize", () => {
  views.forEach(view => view.draw());
  P.go(P.step);
});
P.open();
