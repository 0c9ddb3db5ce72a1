"""Draws data.svg, tensor.svg and zero.svg: ``python -m docs.figures.shares``."""

from docs.figures.drawing import COLORS, COMMON, FOLDER, box, line, picture, text

#: Bytes of a parameter in float32: itself, its gradient, Adam's two moments.
BYTES = {"parameters": 4, "gradients": 4, "Adam's state": 8}


def data() -> str:
    """Replicas: own samples, equal models, own gradients, and the sum that all of them have."""
    heads = {20: "samples", 190: "the model", 400: "own gradients", 600: "their sum, on all"}
    parts = [text(x, 24, words, "head") for x, words in heads.items()]
    rows = [60 + 56 * rank for rank in range(3)]
    for rank, y in enumerate(rows):
        parts.append(text(20, y - 8, f"rank {rank}"))
        parts += [box(20 + 26 * sample, y, 20, 20, COLORS[rank]) for sample in range(4)]
        parts += [line(124, y + 10, 190, y + 10), line(338, y + 10, 400, y + 10)]
        parts += [box(190 + 50 * layer, y, 46, 20, COMMON) for layer in range(3)]
        parts.append(box(400, y, 90, 20, COLORS[rank]))
        parts += [line(490, y + 10, 600, to + 10) for to in rows]
        parts += [box(600 + 46 * of, y, 46, 20, COLORS[of]) for of in range(3)]
    return picture("Data parallel: three replicas", 760, 210, parts)


def tensor() -> str:
    """Two ranks share a perceptron: columns of the first matrix, rows of the second."""
    own = COLORS[:2]
    heads = {20: "x, whole", 124: "A, by columns", 290: "hidden", 440: "B, by rows"}
    parts = [text(x, 24, words, "head") for x, words in (heads | {560: "the sum, whole"}).items()]
    signs = {100: "×", 262: "→", 420: "×", 524: "→", 645: "+"}
    parts += [text(x, 95, sign) for x, sign in signs.items()]
    parts.append(box(20, 40, 60, 100, COMMON))
    for rank, colour in enumerate(own):
        parts += [
            box(124 + 60 * rank, 60, 60, 60, colour),
            box(290 + 60 * rank, 40, 60, 100, colour),
            box(440, 30 + 60 * rank, 60, 60, colour),
            box(560 + 110 * rank, 40, 60, 100, colour),
            box(20 + 90 * rank, 168, 14, 14, colour),
            text(40 + 90 * rank, 180, f"rank {rank}"),
        ]
    return picture("Tensor parallel: two ranks share two matrices", 760, 196, parts)


def zero() -> str:
    """Four ranks at each level, which shares one kind more; a box is what a replica would hold."""
    parts, ranks = [], len(COLORS)
    for level in range(4):
        left, held = 120 + 168 * level, 0.0
        for kind, (name, size) in enumerate(BYTES.items()):
            count = ranks if kind >= len(BYTES) - level else 1
            held += size / count
            part, top = 18 * size / count, 60 + 78 * kind
            parts += [text(20, top + 36, name)] if not level else []
            for rank in range(ranks):
                y = top + 16 * rank
                start = left + part * rank if count > 1 else left
                parts += [box(start, y, part, 12, COLORS[rank]), box(left, y, 18 * size, 12, None)]
        parts += [
            text(left, 24, f"zero = {level}", "head"),
            text(left, 46, f"{held:g} bytes a parameter"),
        ]
    return picture("ZeRO: what each of four ranks holds", 800, 300, parts)


#: The pictures by their file.
FIGURES = {"data": data, "tensor": tensor, "zero": zero}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
