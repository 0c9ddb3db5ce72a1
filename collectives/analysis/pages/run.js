const BUFFERS = ["sendbuf", "recvbuf", "workspace"];
const [RECEIVE, REDUCE, COPY] = [0, 1, 2];
const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const cells = (buffer, first, n) =>
  `${BUFFERS[buffer]}[${n === 1 ? first : `${first}…${first + n - 1}`}]`;

/** An algorithm on some ranks: what all cells hold, and the place in the schedule. */
class Run {
  constructor(told) {
    Object.assign(this, told);
    this.facts = [];
    this.held = this.cells.map(counts => counts.map(n => Array.from({ length: n }, () => null)));
    for (const [rank, buffer, i, node, done] of this.start) this.held[buffer][rank][i] = { node, done };
    this.at = 0;
    this.before = this.rounds.map(() => []); // what a round has overwritten, to step back
  }
  /** A node's contributions: {ranks: from left to right, chunk, text}. */
  fact(node) {
    if (this.facts[node]) return this.facts[node];
    const [left, right] = this.nodes[node];
    if (left < 0) return (this.facts[node] = { ranks: [-1 - left], chunk: right, text: `r${-1 - left}` });
    const a = this.fact(left), b = this.fact(right);
    const ranks = [...new Set([...a.ranks, ...b.ranks])];
    return (this.facts[node] = { ranks, chunk: a.chunk, text: `(${a.text}+${b.text})` });
  }
  seek(step) {
    const to = Math.min(step, this.rounds.length);
    while (this.at < to) {
      const old = (this.before[this.at] = []);
      for (const [rank, buffer, i, node, done] of this.rounds[this.at++].writes) {
        old.push(this.held[buffer][rank][i]);
        this.held[buffer][rank][i] = { node, done };
      }
    }
    while (this.at > to) {
      const { writes } = this.rounds[--this.at];
      for (let w = writes.length - 1; w >= 0; w--) {
        const [rank, buffer, i] = writes[w];
        this.held[buffer][rank][i] = this.before[this.at][w];
      }
    }
  }
  /** The round just completed; null before the first, and after this run has ended. */
  round(step) { return step > 0 && step <= this.rounds.length ? this.rounds[step - 1] : null; }
}

/** One move as a sentence. */
function sentence([kind, from, to, b, first, c, target, n, ob, operand, sent], round) {
  const here = cells(c, target, n);
  if (kind === COPY) return `rank ${to} copies its ${cells(b, first, n)} to ${here}`;
  const when = sent === round ? "" : ` (in its round ${sent})`;
  const what = `rank ${from} sends ${cells(b, first, n)}${when} to rank ${to}`;
  if (kind === RECEIVE) return `${what}, which stores it in ${here}`;
  const own = ob === c && operand === target ? "it" : `its ${cells(ob, operand, n)}`;
  return own === "it" ? `${what}, which adds it to ${here}` : `${what}, which adds ${own} and stores the sum in ${here}`;
}

/** A round in a few words: who sends how much to whom, where all do alike. */
function summary(run, step) {
  if (step === 0) return "before the first round, every rank holds its own data only";
  const round = run.round(step);
  if (!round) return `has ended after ${plural(run.rounds.length, "round")}`;
  const sent = round.moves.filter(m => m[0] !== COPY), copies = round.moves.length - sent.length;
  const says = copies ? [plural(copies, "copy within a rank", "copies within ranks")] : [];
  if (sent.length) {
    const adds = sent.filter(m => m[0] === REDUCE).length;
    const sizes = [...new Set(sent.map(m => m[7]))];
    const each = sizes.length === 1 ? ` of ${plural(sizes[0], "chunk")}` : "";
    const how = adds === sent.length ? "added" : adds ? `${adds} of them added` : "stored";
    says.push(`${plural(sent.length, "message")}${each}${whom(run.size, sent)}, ${how} on arrival`);
  }
  return `round ${step - 1}: ${says.join("; ") || "empty here; nothing moves, the ranks keep in step"}`;
}

/** The pattern of a round's messages, if it has a simple one. */
function whom(size, sent) {
  const ahead = new Set(sent.map(m => (m[2] - m[1] + size) % size));
  const pairs = new Set(sent.map(m => `${m[1]} ${m[2]}`));
  if (sent.length === size && ahead.size === 1) {
    const [by] = ahead;
    const target = by <= size / 2 ? `r+${by}` : `r−${size - by}`;
    return size === 2 ? " between the two ranks" : `, from each rank r to rank ${target} (mod ${size})`;
  }
  const roots = new Set(sent.map(m => m[1])), targets = new Set(sent.map(m => m[2]));
  if (sent.length > 1 && roots.size === 1) return ` from rank ${[...roots][0]}`;
  if (sent.length > 1 && targets.size === 1) return ` to rank ${[...targets][0]}`;
  const back = sent.every(m => pairs.has(`${m[2]} ${m[1]}`));
  if (back && sent.length === pairs.size && sent.length === roots.size) return ", exchanged in pairs of ranks";
  if (pairs.size === size * (size - 1)) return " between all pairs of ranks";
  return "";
}
