"""Outcomes of many drills in one table: a row a kind of fault."""

from collections import Counter
from collections.abc import Sequence

from tests.drills.drill import Outcome
from tests.drills.faults import KINDS

_HEAD = ("fault", "drills", "went on", "named, resumed", "wrong", "slowest end", "steps lost")


def markdown(outcomes: Sequence[Outcome]) -> str:
    lines = [" | ".join(_HEAD), "|".join(["---", *["---:"] * (len(_HEAD) - 1)])]
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        own = [o for o in outcomes if o.kind == kind and o.verdict != "skipped"]
        if not own:
            continue
        verdicts = Counter(outcome.verdict for outcome in own)
        wrong = sum(not outcome.good for outcome in own)
        cells = (
            f"`{kind}`: {KINDS[kind].text}",
            str(len(own)),
            str(verdicts["went on"]),
            str(verdicts["named"]),
            str(wrong),
            f"{max(outcome.seconds for outcome in own):.1f} s",
            str(max(outcome.lost for outcome in own)),
        )
        lines.append(" | ".join(cells))
    text = "\n".join(f"| {line} |" for line in lines) + "\n"
    for outcome in outcomes:
        if not outcome.good:
            text += f"\n`{outcome.fault}` {outcome.verdict}: {' '.join(outcome.words.split())}\n"
    skipped = {o.kind: o.words for o in outcomes if o.verdict == "skipped"}
    for kind, why in skipped.items():
        text += f"\n`{kind}` skipped: {why}\n"
    return text
