"""Rows of scores of which a rank may have some columns, or none; nothing here waits."""

from mpitrain.arrays import Array, array_namespace


def largest(rows: Array) -> Array:
    """Of each row; ``-inf`` of a row without columns."""
    xp = array_namespace(rows)
    if not rows.shape[1]:
        return xp.full(len(rows), -xp.inf, rows.dtype)
    found: Array = rows.max(axis=1)
    return found


def picked_from(rows: Array, column: Array) -> Array:
    """Each row's element in its column; 0 where the column is another rank's."""
    xp = array_namespace(rows)
    count, columns = rows.shape
    if not columns:
        return xp.zeros(count, rows.dtype)
    own = (column >= 0) & (column < columns)
    picked: Array = rows[xp.arange(count), xp.where(own, column, 0)]
    return xp.where(own, picked, picked.dtype.type(0))
