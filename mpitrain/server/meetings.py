"""When all ranks of a job with servers meet."""


def next_meeting(first: int, end: int, window: int, every: int) -> int:
    """The step after which all ranks meet again.

    Args:
        first: step after which they have met.
        end: the last step of the epoch, or of the run.
        window: steps between meetings at most; meetings are at its multiples.
        every: steps between checkpoints, after each of which they meet; 0: there are none.
    """
    ends = [end, first + window - first % window]
    if every:
        ends.append(first + every - first % every)
    return min(ends)
