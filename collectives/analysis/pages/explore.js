/** The tree of an expression: leaves from left to right, each sum over its operands. */
function tree(run, node) {
  const lines = [], marks = [];
  let next = 0;
  const lay = n => {
    const [left, right] = run.nodes[n];
    if (left < 0) {
      const x = 20 + 34 * next++;
      marks.push([x, 0, `r${-1 - left}`]);
      return [x, 0];
    }
    const [a, ha] = lay(left), [b, hb] = lay(right), h = Math.max(ha, hb) + 1, x = (a + b) / 2;
    lines.push([a, ha, x, h], [b, hb, x, h]);
    marks.push([x, h, "+"]);
    return [x, h];
  };
  const depth = lay(node)[1], step = Math.min(34, 150 / Math.max(1, depth));
  const y = h => 18 + (depth - h) * step, width = 34 * next + 8, height = 36 + depth * step;
  const elbow = ([x0, h0, x1, h1]) => `<path class="edge reduce" d="M${x0} ${y(h0)}V${y(h1)}H${x1}"/>`;
  const mark = ([x, h, t]) => t === "+"
    ? `<circle cx="${x}" cy="${y(h)}" r="7" fill="var(--blue)"/><text x="${x}" y="${y(h) + 4}" text-anchor="middle" font-size="13" style="fill:var(--card)">+</text>`
    : `<rect x="${x - 15}" y="${y(h) - 11}" width="30" height="22" rx="6" fill="var(--soft)" stroke="var(--rule)"/><text x="${x}" y="${y(h) + 4.5}" text-anchor="middle" font-size="13">${t}</text>`;
  return `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="the order of the additions as a tree">${lines.map(elbow).join("")}${marks.map(mark).join("")}</svg>`;
}

/** A run on the page: the wheel of ranks, the cells, what the chosen cell holds, the moves. */
class View {
  constructor(name, run, place) {
    this.run = run;
    this.node = document.createElement("section");
    this.node.className = "card view";
    this.node.setAttribute("aria-label", name);
    this.node.innerHTML = `<div class="head"><h2>${escaped(name)}</h2><span class="round"></span></div>
      <div class="wheel"></div><div class="buffers"></div><div class="why" aria-live="polite"></div>
      <details class="moves"><summary></summary><ol></ol></details>`;
    this.part = what => this.node.querySelector(what);
    this.tds = BUFFERS.map(() => []);
    for (const buffer of [1, 2, 0]) this.table(buffer);
    this.wheel = new Wheel(run, this.part(".wheel"), place.rank);
    const found = event => event.target.closest("td[data-at]");
    const over = (event, keep) => {
      const td = found(event);
      if (td) place.choose(this, td.dataset.at.split(".").map(Number), keep);
    };
    this.node.addEventListener("pointerover", event => { // where it would not move what is pointed at
      if (event.pointerType === "mouse" && WIDE.matches) over(event, false);
    });
    this.node.addEventListener("click", event => over(event, true));
    this.part(".buffers").addEventListener("pointerleave", () => place.choose(this, null, false));
  }
  table(buffer) {
    const counts = this.run.cells[buffer], most = Math.max(...counts);
    if (!most) return;
    const box = document.createElement("div");
    box.className = "buffer";
    Object.assign(box.dataset, { most, name: BUFFERS[buffer] });
    const head = Array.from({ length: most }, (_, i) => `<th scope="col">${i}</th>`).join("");
    const rows = counts.map((n, rank) => `<tr><th scope="row">r${rank}</th>` +
      Array.from({ length: n }, (_, i) => `<td tabindex="-1" data-at="${rank}.${buffer}.${i}"></td>`).join("") + "</tr>");
    const what = ["the caller's data, never written to", "where the result goes", "the algorithm's own memory"][buffer];
    box.innerHTML = `<h3>${BUFFERS[buffer]}: ${what}</h3><div class="scroll"><table aria-label="${BUFFERS[buffer]}">
      <thead><tr><th></th>${head}</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
    this.part(".buffers").append(box);
    for (const td of box.querySelectorAll("td")) {
      const [rank, , i] = td.dataset.at.split(".").map(Number);
      (this.tds[buffer][rank] ??= [])[i] = td;
    }
  }
  /** Cells as large as fit, 20 to 46 pixels. */
  fit() {
    for (const box of this.node.querySelectorAll(".buffer")) {
      const most = +box.dataset.most, rank = 34, width = box.clientWidth;
      const tall = this.run.size > 16 ? 24 : most === 1 || box.dataset.name === "sendbuf" ? 30 : 46;
      const fits = Math.floor((width - rank - 8) / most) - 2;
      box.style.setProperty("--cell", `${clamp(fits, 18, tall)}px`);
    }
  }
  show(step, forward, chosen) {
    const { run } = this;
    run.seek(step);
    const round = run.round(step);
    this.part(".round").textContent = summary(run, step);
    const fresh = new Set((round ? round.writes : []).map(([r, b, i]) => `${r}.${b}.${i}`));
    for (const [buffer, ranks] of this.tds.entries()) for (const [rank, row] of ranks.entries())
      (row || []).forEach((td, i) => this.paint(td, rank, buffer, i, fresh));
    this.wheel.show(round, step - 1, forward);
    const list = round ? round.moves.map(m => `<li>${sentence(m, step - 1)}</li>`) : [];
    this.part(".moves").hidden = !list.length;
    this.part(".moves summary").textContent = `All ${plural(list.length, "move")} of round ${step - 1}`;
    this.part(".moves ol").innerHTML = list.join("");
    this.choose(chosen, step);
  }
  paint(td, rank, buffer, i, fresh) {
    const { run } = this, held = run.held[buffer][rank][i], isNew = fresh.has(td.dataset.at);
    const key = `${held?.node} ${held?.done} ${isNew} ${DARK.matches}`;
    if (td.dataset.key === key) return;
    td.dataset.key = key;
    const name = `rank ${rank} ${BUFFERS[buffer]} ${i}: `;
    if (!held) {
      td.className = td.style.background = td.style.color = td.textContent = "";
      td.setAttribute("aria-label", name + "empty");
      return;
    }
    const { ranks, text } = run.fact(held.node), done = held.done, adds = run.reduces && run.size > 1;
    const share = (adds ? ranks.length : ranks[0] + 1) / run.size;
    td.className = `held${done ? " done" : ""}${isNew ? " new" : ""}`;
    td.style.background = done && adds ? "" : blue(share);
    td.style.color = done && adds ? "" : !DARK.matches && share > 0.55 ? "#fff" : "var(--ink)";
    td.textContent = adds ? (done ? "✓" : ranks.length) : ranks[0];
    if (adds) {
      const stops = Array.from({ length: run.size }, (_, r) =>
        `${ranks.includes(r) ? "currentColor" : "transparent"} ${(100 * r) / run.size}% ${(100 * (r + 1)) / run.size}%`);
      const strip = document.createElement("b"); // which ranks are in it, from 0 on the left
      strip.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
      td.append(strip);
    } else if (done) td.append(document.createElement("b"));
    td.setAttribute("aria-label", name + text + (done ? ", the result" : ""));
  }
  /** Explains a cell; `at` is [rank, buffer, cell] or null. */
  choose(at, step) {
    for (const td of this.node.querySelectorAll("td.chosen, td.from")) td.classList.remove("chosen", "from");
    const td = at && this.tds[at[1]][at[0]]?.[at[2]];
    this.wheel.choose(td ? at[0] : null);
    const why = this.part(".why");
    if (!td) {
      why.innerHTML = `<p class="dim">Point at a cell, or tap it, to see which contributions it holds and in which order they were added.</p>`;
      return;
    }
    td.classList.add("chosen");
    const [rank, buffer, i] = at, { run } = this, held = run.held[buffer][rank][i];
    const round = run.round(step), name = `rank ${rank}, ${BUFFERS[buffer]}[${i}]`;
    const wrote = (round ? round.writes : []).filter(([r, b, j]) => r === rank && b === buffer && j === i);
    const moves = wrote.map(w => round.moves[w[5]]);
    wrote.forEach((w, n) => {
      const m = moves[n], source = this.tds[m[3]][m[1]]?.[m[4] + i - m[6]];
      source?.classList.add("from");
    });
    if (!held) {
      why.innerHTML = `<h3>${name}</h3><p>Nothing was written here yet.</p>`;
      return;
    }
    const { ranks, chunk, text } = run.fact(held.node), all = ranks.length === run.size;
    const of = all ? `all ${run.size} ranks` : `${ranks.length} of ${run.size} ranks`;
    const what = ranks.length > 1 ? `The sum of sendbuf[${chunk}] of ${of}` : `Rank ${ranks[0]}'s sendbuf[${chunk}]`;
    const reading = "r2 stands for what rank 2 put in; parentheses tell what was added first.";
    const list = moves.map(m => `<li>${sentence(m, step - 1)}</li>`).join("");
    why.innerHTML = `<h3>${name}</h3><p class="expression">${text}</p>
      <p>${what}${held.done ? ": the result" : ""}. <span class="dim">${ranks.length > 1 ? reading : ""}</span></p>
      ${ranks.length > 1 ? tree(run, held.node) : ""}
      ${list ? `<h3>In this round</h3><ol>${list}</ol>` : '<p class="dim">Not written in this round.</p>'}`;
  }
}

const WIDE = matchMedia("(min-width: 850px)");
const DARK = matchMedia("(prefers-color-scheme: dark)");
/** Blue, the deeper the larger the share. */
const blue = share => `hsl(210 ${55 + 15 * share}% ${DARK.matches ? 24 + 28 * share : 93 - 50 * share}%)`;
let views = [], chosen = null, kept = null;

/** Chooses a cell in all views; one that is kept stays when the pointer leaves. */
function choose(view, at, keep) {
  if (keep) kept = chosen && kept && String(kept) === String(at) ? null : at;
  chosen = at || kept;
  for (const one of views) one.choose(chosen, P.step);
  P.link({ cell: kept ? kept.join(".") : "" });
}

/** Moves the chosen cell: by ranks, by cells, or to the next buffer that there is. */
function move(ranks, along, buffers) {
  const { run } = views[0], has = (r, b) => run.cells[b][r] > 0;
  let [rank, buffer, i] = kept || chosen || [0, 1, 0];
  if (kept || chosen) {
    rank = (rank + ranks + run.size) % run.size;
    i += along;
    if (buffers) buffer = (buffer + 1) % 3;
  }
  for (let n = 0; n < 3 && !has(rank, buffer); n++) buffer = (buffer + 1) % 3;
  const n = run.cells[buffer][rank];
  kept = null;
  choose(views[0], n ? [rank, buffer, (i + n) % n] : null, true);
  views[0].tds[buffer][rank]?.[kept?.[2]]?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function build(size) {
  const box = $("views");
  box.textContent = "";
  box.className = DATA.algorithms.length > 1 ? "two" : "one";
  $("said").classList.toggle("unseen", DATA.algorithms.length > 1); // each view says its own
  chosen = kept = null;
  const rank = r => choose(null, r === null ? null : [r, views[0].run.cells[1][r] ? 1 : 0, 0], true);
  views = DATA.algorithms.map(({ name, runs }) => new View(name, new Run(runs[size]), { choose, rank }));
  box.append(...views.map(view => view.node));
  views.forEach(view => view.fit());
  const adds = views[0].run.reduces, swatch = (style, text) => `<span><i style="${style}"></i>${text}</span>`;
  const line = kind => `border:0;border-bottom:3px ${kind};border-radius:0`;
  const colours = adds
    ? [[`background:${blue(0.1)}`, "few contributions"],
      [`background:${blue(0.9)}`, "many: the number counts them, the strip shows whose"],
      ["background:var(--amber)", "✓ all: the result"]]
    : [[`background:${blue(0.5)}`, "the number is the rank that the data come from"],
      ["border-bottom:5px solid var(--amber)", "in its place: the result"]];
  const arrows = [[line("solid var(--blue)"), "a message that is added"],
    [line("dashed var(--amber)"), adds ? "one that is stored; its label is the chunk" : "a message; its label is the chunk"]];
  const all = [...colours, ["border:2.5px solid var(--ring)", "written in this round"], ...arrows.slice(adds ? 0 : 1)];
  $("legend").innerHTML = all.map(([style, text]) => swatch(style, text)).join("");
}

const P = player({
  word: "round", period: 1100,
  last: () => Math.max(...views.map(view => view.run.rounds.length)),
  label: step => (step ? `${step} of ${Math.max(...views.map(view => view.run.rounds.length))} rounds` : "start"),
  show(step, forward) {
    for (const view of views) view.show(step, forward, chosen);
    const says = views.map(view => (views.length > 1 ? `${view.run.name}: ` : "") + summary(view.run, step));
    $("said").textContent = says.join(". ").replace(/^./, c => c.toUpperCase()) + ".";
  },
  key(event) {
    if (event.key === "ArrowUp") move(-1, 0, false);
    else if (event.key === "ArrowDown") move(1, 0, false);
    else if (event.shiftKey && event.key === "ArrowLeft") move(0, -1, false);
    else if (event.shiftKey && event.key === "ArrowRight") move(0, 1, false);
    else if (event.key === "b") move(0, 0, true);
    else if (event.key === "Escape") { kept = null; choose(null, null, false); }
    else return false;
    P.stop();
    return true;
  },
  opened(parts) {
    const size = DATA.sizes.includes(+parts.ranks) ? +parts.ranks : DATA.sizes[0];
    if (!views.length || views[0].run.size !== size) build(size);
    $("ranks").value = size;
    P.link({ ranks: size });
    if (/^\d+\.[012]\.\d+$/.test(parts.cell || "")) kept = chosen = parts.cell.split(".").map(Number);
    P.go(+parts.round || 0);
    P.link({ cell: kept ? kept.join(".") : "" });
  },
});

$("title").textContent = DATA.title;
$("ranks").innerHTML = DATA.sizes.map(size => `<option>${size}</option>`).join("");
$("ranks").parentNode.hidden = DATA.sizes.length < 2;
$("ranks").onchange = () => {
  P.stop();
  build(+$("ranks").value);
  P.link({ ranks: $("ranks").value, cell: "" });
  P.go(0);
};
addEventListener("resize", () => views.forEach(view => view.fit()));
DARK.addEventListener("change", () => P.go(P.step));
P.open();
