"""A benchmark's results in the columns of OSU's benchmarks."""

import numpy as np

from collectives.bench.measure import Result


def osu(results: list[Result]) -> str:
    """OSU's columns and the buffers, one block for each algorithm.

    Latencies of collectives are the mean, least and largest over the ranks.
    """
    lines = []
    for algorithm in dict.fromkeys(r.algorithm for r in results):
        mine = [r for r in results if r.algorithm == algorithm]
        heads = "".join(f"{name:>18}" for name in _numbers(mine[0]))
        lines.append(f"# {mine[0].collective} {algorithm}")
        lines.append(f"# Size    {heads}  Iterations  Validation  Memory   Place")
        lines += [
            f"{_size(r):<10}{''.join(f'{number:>18.2f}' for number in _numbers(r).values())}"
            f"{r.iters * len(r.times_us):>12}"
            f"{'-' if r.wrong is None else 'Fail' if r.wrong else 'Pass':>12}"
            f"  {r.memory:<9}{'in' if r.in_place else 'out'}"
            for r in mine
        ]
    return "\n".join(lines)


def _size(r: Result) -> int:
    """Bytes as OSU counts them: a rank's block, where blocks are only moved."""
    if r.contract is None or r.contract.reduces:
        return r.bytes
    return r.bytes // r.contract.blocks(r.ranks)


def _numbers(r: Result) -> dict[str, float]:
    """Numbers of OSU's benchmark of this name, by the heads of its columns."""
    if r.contract is None and r.collective != "latency":
        return {"Bandwidth(MB/s)": 1e3 * r.algbw}
    if r.contract is None:
        return {"Avg Latency(us)": float(np.mean(r.times_us))}
    found = float(np.mean(r.ranks_us)), min(r.ranks_us), max(r.ranks_us)
    return dict(zip(("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)"), found))
