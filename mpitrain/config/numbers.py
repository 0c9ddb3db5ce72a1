"""Numbers that the tables of a job may hold."""

from typing import Annotated

from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
#: Between nothing and all.
Fraction = Annotated[float, Meta(gt=0, lt=1)]
#: Nothing, or a part.
Part = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
#: A count, or none.
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
